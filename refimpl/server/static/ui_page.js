// The page at /ui: the view of shell.js over frames that the server sends. No CDN, no cookie.
//
// Frames are server-sent events, read by fetch, which can send a key in a header: an address would end up in logs. What a
// viewer does (a button, a key, a click) goes back by POST. If the stream ends, the page comes back by itself.

const KEPT_KEY = "refimpl-api-key";
const AGAIN = [500, 1000, 2000, 5000]; // milliseconds until the next try

function bytesOf(text) {
  const coded = atob(text), bytes = new Uint8Array(coded.length);
  for (let i = 0; i < coded.length; i++) bytes[i] = coded.charCodeAt(i);
  return bytes;
}

/** The events of a response, as objects. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

/** A model as anywidget's. `opening` says what is shown; messages go to the viewer that it names. */
function streamedModel(opening) {
  const listeners = [];
  let last = Promise.resolve(); // in the order of the clicks
  const send = (message) => {
    const body = JSON.stringify(message), headers = { "Content-Type": "application/json" };
    last = last.then(() => fetch(`ui/viewers/${opening.viewer}`, { method: "POST", headers, body })).catch(() => {});
  };
  return {
    get: (key) => ({ shown: opening.shown, heading: opening.heading, transport_shown: true })[key],
    on: (_event, listener) => listeners.push(listener), off: () => listeners.splice(0), send,
    take({ buffers = [], ...message }) {
      const views = buffers.map((text) => new DataView(bytesOf(text).buffer));
      for (const listener of listeners) listener(message, views);
    },
  };
}

/** Follow the engine until the stream ends. */
async function follow(place, note, headers) {
  const response = await fetch(`ui/frames${location.search}`, { headers });
  if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `the server says ${response.status}`);
  let model = null, stop = () => {};
  try {
    for await (const message of eventsOf(response)) {
      if (message.type === "opening") {
        note.textContent = message.texts ? "" : "Texts are hidden. With the server's API key they are shown.";
        place.replaceChildren();
        model = streamedModel(message);
        stop = render({ model, el: place });
      } else model?.take(message);
    }
  } finally { stop(); }
}

async function openUi() {
  const place = document.getElementById("view"), note = document.getElementById("note"), form = document.getElementById("key");
  let tries = 0;
  form.onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEPT_KEY, form.elements.key.value);
    location.reload();
  };
  for (;;) {
    const key = sessionStorage.getItem(KEPT_KEY);
    try {
      await follow(place, note, key ? { Authorization: `Bearer ${key}` } : {});
      tries = 0;
      note.textContent = "The stream ended; trying again.";
    } catch (error) { note.textContent = `${error.message}; trying again.`; }
    await new Promise((wake) => setTimeout(wake, AGAIN[Math.min(tries++, AGAIN.length - 1)]));
  }
}

openUi();
