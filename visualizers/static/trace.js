// A computation that lies whole in the page: all its pictures came at once, and to step through them asks nobody.

/** The model that shell.js renders, over the pictures of an anywidget's model. */
function traceModel(model) {
  const pictures = model.get("pictures"), last = pictures.length - 1, listeners = [], name = model.get("shown")[0][0];
  const player = { position: model.get("position"), playing: false, speed: 2, timer: 0 };

  function emit(whole = false) {
    const { caption, moment, svg, why } = pictures[player.position];
    const transport = {
      noun: moment, position: player.position, first: 0, gone: 0, count: last + 1, step: player.position, clock: null,
      live: false, playing: player.playing, speed: player.speed, pinned: null, held: false, drivable: false, engine: false, why,
    };
    for (const listener of listeners) listener({ type: "frame", whole, transport, marks: [], pictures: { [name]: { caption, svg } } }, []);
  }
  function stop() { player.playing = false; clearInterval(player.timer); }
  function seek(position) { stop(); player.position = Math.max(0, Math.min(last, position)); emit(); }
  function play() {
    stop();
    if (player.position === last) player.position = 0;
    player.playing = true;
    player.timer = setInterval(() => {
      if (player.position < last) player.position += 1; else stop();
      emit();
    }, 1000 / player.speed);
    emit();
  }
  model.on("change:position", () => seek(model.get("position")));
  const actions = {
    hello: () => emit(true), step: (m) => seek(player.position + m.delta), seek: (m) => seek(m.position), live: () => seek(last),
    play, pause: () => { stop(); emit(); }, speed: (m) => { player.speed = m.speed; if (player.playing) play(); else emit(); },
  };
  return {
    get: (key) => model.get(key), on: (_event, listener) => listeners.push(listener), off: stop, send: (message) => actions[message.type]?.(message),
  };
}
