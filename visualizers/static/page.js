// An exported page: the view of shell.js over frames that lie in the page itself. No kernel, no network.
// `recorded` is { shown: [[name, title, question]], heading, frames: [{ transport, changes: { figure: { key: value } }, buffers: [base64] }], marks }.

/** A model as anywidget's, which plays recorded frames. */
function recordedModel(recorded) {
  const listeners = [], count = recorded.frames.length;
  const player = { position: count - 1, playing: false, speed: 8, pinned: null, timer: 0 };
  let at = -1, pictures = {}, cells = {};

  /** Bring the pictures to a position: forward by the changes of each frame, backward from the beginning. */
  function goTo(position) {
    const nextOne = position === at + 1 && at >= 0;
    if (position < at) { at = -1; pictures = {}; cells = {}; }
    while (at < position) {
      at += 1;
      const { changes, buffers } = recorded.frames[at];
      for (const [name, values] of Object.entries(changes)) pictures[name] = { ...pictures[name], ...values };
      for (const [name, picture] of Object.entries(pictures)) if (changes[name]?.cells) cells[name] = patch(cells[name], picture.cells, buffers[picture.buffer]);
    }
    return nextOne;
  }
  function patch(old, kind, text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)), words = new Uint32Array(bytes.buffer);
    if (kind === "all") return words;
    const next = old.slice();
    for (let i = 0; i < words.length; i += 3) { next[2 * words[i]] = words[i + 1]; next[2 * words[i] + 1] = words[i + 2]; }
    return next;
  }
  function emit(whole) {
    const nextOne = goTo(player.position) && !whole, buffers = [], drawn = {};
    const { changes, buffers: sent } = recorded.frames[at];
    for (const [name, picture] of Object.entries(pictures)) {
      drawn[name] = { ...picture };
      if (!cells[name]) continue;
      const changed = nextOne && changes[name]?.cells === "changed";
      const bytes = changed ? Uint8Array.from(atob(sent[picture.buffer]), (c) => c.charCodeAt(0)) : new Uint8Array(cells[name].slice().buffer);
      drawn[name].cells = changed ? "changed" : "all";
      drawn[name].buffer = buffers.push(new DataView(bytes.buffer)) - 1;
    }
    const transport = { ...recorded.frames[at].transport, live: false, playing: player.playing, speed: player.speed, pinned: player.pinned };
    for (const listener of listeners) listener({ type: "frame", whole, transport, marks: whole ? recorded.marks : [], pictures: drawn }, buffers);
  }
  const say = (text) => listeners.forEach((listener) => listener({ type: "said", text }, []));
  function stop() { player.playing = false; clearInterval(player.timer); }
  function seek(position) { player.position = Math.max(0, Math.min(count - 1, position)); emit(false); }
  function play() {
    stop();
    if (player.position === count - 1) player.position = 0;
    player.playing = true;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    player.timer = setInterval(() => { if (player.position >= count - 1) stop(); else player.position += 1; emit(false); }, 1000 / (still ? Math.min(2, player.speed) : player.speed));
    emit(false);
  }
  const actions = {
    hello: () => emit(true), step: (m) => { stop(); seek(player.position + m.delta); }, seek: (m) => { stop(); seek(m.position); },
    live: () => { stop(); seek(count - 1); }, play, pause: () => { stop(); emit(false); }, pin: (m) => { player.pinned = m.request; emit(false); },
    speed: (m) => { player.speed = m.speed; if (player.playing) play(); else emit(false); },
    next_preemption: () => {
      const found = recorded.marks.filter(([, kind]) => kind === "preemption").map(([position]) => position);
      if (!found.length) say("nothing was preempted in this log");
      else { stop(); seek(found.find((position) => position > player.position) ?? found[0]); }
    },
    hold: () => say("this is a recorded log: no engine runs behind it"),
  };
  return {
    get: (key) => ({ shown: recorded.shown, heading: recorded.heading, transport_shown: true })[key],
    on: (_event, listener) => listeners.push(listener), off: () => {}, send: (message) => actions[message.type]?.(message),
  };
}

async function openPage(packed, el) {
  const stream = new Blob([Uint8Array.from(atob(packed), (c) => c.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("gzip"));
  render({ model: recordedModel(JSON.parse(await new Response(stream).text())), el });
}
