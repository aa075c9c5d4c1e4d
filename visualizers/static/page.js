// An exported page: the view of shell.js over frames that lie in the page itself. No kernel, no network.
//
// `opening` is { shown: [[name, title, question]], heading, marks, first, count, size, frame }: the last frame is there at once,
// with its buffers as runs: the cell of each, 64 bits, then how many there are, 32 bits. It is not packed, since unpacking lets others have
// their turn: the page draws it while the rest is still being read.
// All frames lie in chunks of `size`, each packed in an element of its own, and are unpacked when somebody goes there. A frame
// is { transport, changes: { figure: { key: value } }, buffers: [base64] }; the first of each chunk is whole.

const CHUNKS_KEPT = 4;

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const coded = atob(text), bytes = new Uint8Array(coded.length);
  for (let i = 0; i < coded.length; i++) bytes[i] = coded.charCodeAt(i);
  return bytes;
}

/** The object that a gzipped, base64-coded JSON text holds. */
async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** The bytes of all cells, from their runs. */
function cellsOf(runs) {
  const { buffer, length } = bytesOf(runs), cells = new BigUint64Array(buffer, 0, length / 12), lengths = new Uint32Array(buffer, (length / 3) * 2);
  const all = new BigUint64Array(lengths.reduce((a, b) => a + b, 0));
  let at = 0;
  lengths.forEach((number, i) => all.fill(cells[i], at, (at += number)));
  return new Uint8Array(all.buffer);
}

/** The text of a chunk, once the page is read up to there. */
async function chunkText(number) {
  if (document.readyState === "loading") await new Promise((read) => document.addEventListener("DOMContentLoaded", read, { once: true }));
  return document.getElementById(`chunk-${number}`).textContent;
}

/** Pictures at a position, brought there by the changes of frames. */
function recordedPictures(opening) {
  const { first, count, size } = opening, last = Math.floor((count - 1 - first) / size), loaded = new Map();
  let at = null, pictures = {}, cells = {};

  function chunk(number) {
    if (!loaded.has(number)) {
      loaded.set(number, chunkText(number).then(unpack));
      if (loaded.size > CHUNKS_KEPT) loaded.delete(loaded.keys().next().value);
    }
    return loaded.get(number);
  }
  function apply({ changes, buffers }) {
    for (const [name, values] of Object.entries(changes)) {
      pictures[name] = { ...pictures[name], ...values };
      if (values.cells) cells[name] = patch(cells[name], values.cells, bytesOf(buffers[values.buffer]));
    }
  }
  function patch(old, kind, bytes) {
    const words = new Uint32Array(bytes.buffer);
    if (kind === "all") return words;
    for (let i = 0; i < words.length; i += 3) { old[2 * words[i]] = words[i + 1]; old[2 * words[i] + 1] = words[i + 2]; }
    return old;
  }
  /** Go there. Resolves to a frame, and what is to be drawn of each figure: what it changed if it comes next, else all. */
  async function goTo(position) {
    const number = Math.floor((position - first) / size), frames = await chunk(number), start = first + number * size;
    const comesNext = at !== null && position === at + 1;
    if (at === null || at < start || at > position) { at = start - 1; pictures = {}; cells = {}; }
    while (at < position) apply(frames[(at += 1) - start]);
    if (number < last && position - start > size / 2) chunk(number + 1);
    return { frame: frames[position - start], drawn: comesNext ? frames[position - start].changes : pictures, cells };
  }
  return goTo;
}

/** A model as anywidget's, which plays recorded frames. */
function recordedModel(opening) {
  const listeners = [], { first, count, marks } = opening, goTo = recordedPictures(opening);
  const player = { position: count - 1, playing: false, speed: 8, pinned: null, timer: 0 };
  let shown = { frame: { ...opening.frame, buffers: opening.frame.buffers.map(cellsOf) }, drawn: opening.frame.changes, cells: {} }, queue = Promise.resolve(), waiting = 0;

  function emit(whole, { frame, drawn, cells } = { ...shown, drawn: {} }) {
    const buffers = [], pictures = {};
    for (const [name, picture] of Object.entries(drawn)) {
      pictures[name] = { ...picture };
      if (!picture.cells) continue;
      const sent = picture === frame.changes[name], given = frame.buffers[picture.buffer], bytes = sent ? (given instanceof Uint8Array ? given : bytesOf(given)) : new Uint8Array(cells[name].slice().buffer);
      if (!sent) pictures[name].cells = "all";
      pictures[name].buffer = buffers.push(new DataView(bytes.buffer)) - 1;
    }
    const transport = { ...frame.transport, live: false, playing: player.playing, speed: player.speed, pinned: player.pinned };
    for (const listener of listeners) listener({ type: "frame", whole, transport, marks: whole ? marks : [], pictures }, buffers);
  }
  const say = (text) => listeners.forEach((listener) => listener({ type: "said", text }, []));
  function stop() { player.playing = false; clearInterval(player.timer); }
  /** One after the other: a chunk may have to be unpacked first. */
  function show() {
    waiting += 1;
    queue = queue.then(async () => {
      if ((waiting -= 1) > 0) return; // another position is asked for already
      shown = await goTo(player.position);
      emit(false, shown);
    });
  }
  function seek(position) { player.position = Math.max(first, Math.min(count - 1, position)); show(); }
  function play() {
    stop();
    if (player.position === count - 1) player.position = first;
    player.playing = true;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    player.timer = setInterval(() => {
      if (waiting) return;
      if (player.position >= count - 1) { stop(); emit(false); } else { player.position += 1; show(); }
    }, 1000 / (still ? Math.min(2, player.speed) : player.speed));
    show();
  }
  const actions = {
    hello: () => emit(true, shown), step: (m) => { stop(); seek(player.position + m.delta); }, seek: (m) => { stop(); seek(m.position); },
    live: () => { stop(); seek(count - 1); }, play, pause: () => { stop(); emit(false); }, pin: (m) => { player.pinned = m.request; emit(false); },
    speed: (m) => { player.speed = m.speed; if (player.playing) play(); else emit(false); },
    next_preemption: () => {
      const found = marks.filter(([, kind]) => kind === "preemption").map(([position]) => position);
      if (!found.length) say("nothing was preempted in this log");
      else { stop(); seek(found.find((position) => position > player.position) ?? found[0]); }
    },
    hold: () => say("this is a recorded log: no engine runs behind it"),
  };
  return {
    get: (key) => ({ shown: opening.shown, heading: opening.heading, transport_shown: true })[key],
    on: (_event, listener) => listeners.push(listener), off: () => {}, send: (message) => actions[message.type]?.(message),
  };
}

const openPage = (opening, el) => render({ model: recordedModel(JSON.parse(opening.textContent)), el });
