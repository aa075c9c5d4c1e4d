// The shell of a view: the transport bar, the figures' frames, theme, keys, and the messages to and from Python.
//
// A figure is given `ui`: { palette, width, pinned, reducedMotion, theme, pin(request), seek(position), send(message), redraw(),
// onCard(callback) }. It draws what it is sent, and decides nothing.

const SPEEDS = [2, 8, 20, 60];
const END = 8;  // half a thumb: what the scrubber leaves free at either end, as a native range does
const QUIET = 400; // milliseconds without a frame
const APART = 50; // milliseconds in which the first picture comes to the screen, and nothing else is done

const ICONS = {
  back: "M2 2h2v10H2zM12 2v10L5 7z", forward: "M10 2h2v10h-2zM2 2v10l7-5z", play: "M3 1.5v11l9-5.5z", pause: "M3 2h3v10H3zM8 2h3v10H8z",
  theme: "M7 1a6 6 0 1 0 0 12zM7 0a7 7 0 1 1 0 14A7 7 0 0 1 7 0z",
};
const icon = (name) => `<svg viewBox="0 0 14 14" width="14" height="14" fill="currentColor" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`;

/** "light" or "dark", as the page around says: JupyterLab, VS Code, Colab, or the system. */
function pageTheme() {
  const body = document.body, root = document.documentElement, is = (name) => body.classList.contains(name);
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false" ? "dark" : "light";
  if (is("vscode-light") || is("vscode-high-contrast-light")) return "light"; // the latter is an ordinary high contrast too
  if (is("vscode-dark") || is("vscode-high-contrast")) return "dark";
  if (["light", "dark"].includes(root.getAttribute("theme"))) return root.getAttribute("theme");
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** A reason as HTML: who and what in bold, up to the first pause; the numbers behind it plain. */
function reason([who, what]) {
  const end = who ? what.search(/[,:;](?= )|$/) : 0;
  return (who ? `<b>${escapeHtml(`${who} ${what.slice(0, end)}`)}</b>` : "") + escapeHtml(what.slice(end));
}

/** The transport bar; `act(message)` sends to Python. Returns update(transport, marks). */
function mountTransport(root, act, toggleTheme) {
  const button = (label, title, content, message, extra = "") => {
    const b = h("button", { type: "button", "aria-label": label, title, class: extra });
    b.innerHTML = content;
    b.onclick = typeof message === "function" ? message : () => act(message);
    return b;
  };
  const now = h("div", { class: "now", "data-refimpl": "step" });
  const scrubber = h("input", { type: "range", min: "0", value: "0", "aria-label": "Step" });
  const ticks = h("canvas", { "aria-hidden": "true" });
  const scrub = h("div", { class: "scrub" }, ticks, scrubber);
  const why = h("p", { class: "why", "aria-live": "polite", "data-refimpl": "why" });
  const play = button("Play", "Play or pause the log (space)", icon("play"), () => act({ type: state.playing ? "pause" : "play" }), "main");
  const live = button("Follow the engine", "Follow the newest step (End)", "live", { type: "live" });
  const hold = button("Hold the engine", "Hold the engine between two steps, or let it go (h)", "hold", () => act({ type: "hold", hold: !state.held }));
  const speed = button("Speed", "Speed (1 to 4)", "", () => act({ type: "speed", speed: SPEEDS[(SPEEDS.indexOf(state.speed) + 1) % 4] }));
  const preemption = button("Next preemption", "Next preemption (p)", '<span class="signal">▼</span> <span>next<span class="more"> preemption</span></span> <kbd>p</kbd>', { type: "next_preemption" });
  const bar = h("div", { class: "bar", role: "toolbar", "aria-label": "Transport" },
    h("div", { class: "row" },
      button("Step back", "Step back (←)", icon("back"), { type: "step", delta: -1 }), play,
      button("Step forward", "Step forward; at the end, let the engine take a step (→)", icon("forward"), { type: "step", delta: 1 }),
      now, scrub, live, hold, speed, preemption,
      button("Light or dark", "Light or dark (t)", icon("theme"), toggleTheme)), why);
  root.append(bar);
  let state = { position: -1, first: 0, count: 0, playing: false, speed: 8, held: false }, marks = [], note = null;
  scrubber.oninput = () => act({ type: "seek", position: Number(scrubber.value) });
  let scrubWidth = 0, redrawTicks = () => {};
  const measured = new ResizeObserver(() => { if (scrubWidth !== (scrubWidth = scrub.clientWidth)) redrawTicks(); });
  measured.observe(scrub);

  function drawTicks(P) {
    const width = scrubWidth, c = context(ticks, width, 34), span = state.count - 1 - state.first;
    const X = (k) => END + (span > 0 ? (Math.max(0, k - state.first) / span) * (width - 2 * END) : 0);
    c.fillStyle = P.rule; c.fillRect(END, 16, width - 2 * END, 3);
    c.fillStyle = P.ink; c.fillRect(END, 16, X(Math.max(0, state.position)) - END, 3);
    for (const [position, kind] of marks) {
      const x = X(position);
      if (kind === "arrival") { c.fillStyle = P.ink3; c.fillRect(x, 23, 1, 6); }
      else if (kind === "preemption") { c.fillStyle = P.signal; c.beginPath(); c.moveTo(x - 5, 3); c.lineTo(x + 5, 3); c.lineTo(x, 11); c.fill(); }
      else { c.strokeStyle = P.signal; c.lineWidth = 1.6; c.strokeRect(x - 4, 3.5, 7, 7); }
    }
    c.beginPath(); c.arc(X(Math.max(0, state.position)), 17.5, 6, 0, 7); c.fillStyle = P.bg; c.fill(); c.strokeStyle = P.ink; c.lineWidth = 2; c.stroke();
  }
  return {
    say(text) { note = text; },
    marks(more, whole) { marks = whole ? more : more.length ? marks.concat(more) : marks; note = null; },
    stop() { measured.disconnect(); },
    draw(transport, P) {
      state = transport;
      redrawTicks = () => drawTicks(P);
      if (marks.length && marks[0][0] < state.first) marks = marks.filter(([position]) => position >= state.first);
      const gone = transport.gone ? `, the first ${fmt(transport.gone)} not kept` : "";
      const where = transport.step === null ? "No step yet" : `${transport.noun ?? "Step"} ${fmt(transport.step)}`;
      const clock = transport.clock === null ? "" : `, ${transport.clock.toFixed(3)} s`;
      setHtml(now, `<b>${where}</b> <span>of ${fmt(Math.max(0, transport.count - 1))}${clock}${gone}</span>`);
      const reasons = "<em>Why?</em>" + transport.why.map(reason).join(". ").replace(/\.\.$/, ".");
      setHtml(why, note === null ? reasons : `<em>Note</em>${escapeHtml(note)}`);
      why.setAttribute("aria-live", transport.playing || (transport.live && transport.drivable) ? "off" : "polite");
      setHtml(play, icon(transport.playing ? "pause" : "play"));
      play.setAttribute("aria-label", transport.playing ? "Pause" : "Play");
      live.hidden = hold.hidden = !transport.engine;
      preemption.hidden = transport.noun !== undefined; // a log has steps; what has others has no preemptions
      live.classList.toggle("on", transport.live); hold.classList.toggle("on", transport.held);
      setHtml(hold, transport.held ? "held" : "hold");
      setHtml(speed, `${transport.speed} steps/s`);
      scrubber.min = state.first; scrubber.max = Math.max(0, transport.count - 1); scrubber.value = Math.max(0, transport.position);
      scrubber.setAttribute("aria-valuetext", `${where}: ${why.textContent.slice(4)}`);
      if (scrubWidth) drawTicks(P); // else when the page is laid out
    },
  };
}

/** A view over a model that has get, on and send: anywidget's, or the one of an exported page. Returns what takes it down. */
function render({ model, el }) {
  const root = h("div", { class: "refimpl", tabindex: "-1" });
  el.append(root);
  let theme = pageTheme(), chosenTheme = null, last = null, transport = null, queued = false, width = root.clientWidth, quiet = 0, opened = 0; // read while there is nothing to lay out
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches || document.body.classList.contains("vscode-reduce-motion");
  const mounted = {}, stale = new Set(), hidden = new Set(), cells = {};
  let steady = null, watched = null; // from when all figures are there
  /** All figures are to be drawn anew. */
  const everything = () => { Object.keys(mounted).forEach((name) => stale.add(name)); schedule(); };
  function act(message) {
    if (calm && message.type === "speed") message = { type: "speed", speed: SPEEDS[0] };
    if (calm && message.type === "play" && last && last.transport.speed > SPEEDS[0]) model.send({ type: "speed", speed: SPEEDS[0] });
    model.send(message);
  }
  const ui = {
    palette: {}, width: 1216, pinned: null, theme, reducedMotion: calm,
    send: act, pin: (request) => act({ type: "pin", request }), seek: (position) => act({ type: "seek", position }),
    redraw: () => everything(), cardListeners: [], onCard(callback) { this.cardListeners.push(callback); },
  };
  applyTheme();
  const toggleTheme = () => { chosenTheme = ui.theme === "dark" ? "light" : "dark"; applyTheme(); everything(); };
  function applyTheme() {
    ui.theme = chosenTheme ?? pageTheme();
    root.dataset.theme = ui.theme;
    ui.palette = readPalette(root);
  }
  if (model.get("transport_shown")) {
    root.append(h("p", { class: "heading" }, model.get("heading")));
    transport = mountTransport(root, act, toggleTheme);
  }
  function mountFigure([name, shownTitle, question]) {
    const figure = h("figure", { "data-figure": name }), title = h("h2"), caption = h("figcaption"), body = h("div", { class: `body ${name}` });
    title.innerHTML = `${escapeHtml(shownTitle)}<small>${escapeHtml(question)}</small>`;
    figure.append(title, caption, body);
    root.append(figure);
    mounted[name] = { caption, figure, drawing: figures[name].mount(body, ui) };
  }
  const [first, ...others] = model.get("shown");
  mountFigure(first);
  /** The other figures come when the first picture is on the screen. */
  function mountOthers() {
    others.forEach(mountFigure);
    steady = keepHeights(root.querySelectorAll(".why, figcaption, .body"));
    watched = watchWhatIsSeen(mounted, hidden, () => stale.size && schedule());
  }

  function draw(_now, all = false) {
    if (!all) queued = false;
    if (!last || !root.isConnected) return;
    if (!ui.palette.bg) applyTheme();  // the styles were not there yet when the view was made
    width ||= root.clientWidth;
    const room = Math.max(320, Math.min(1216, width - 24));
    if (room !== ui.width) act({ type: "width", width: (ui.width = room) });
    root.classList.toggle("wide", ui.width >= 1000);
    if (ui.pinned !== last.transport.pinned) { ui.pinned = last.transport.pinned; Object.keys(mounted).forEach((name) => stale.add(name)); }
    if (transport) transport.draw(last.transport, ui.palette);
    if (width === 0) return;
    const opening = !isShown();
    for (const name of [...stale]) {
      const picture = last.pictures[name];
      if (!picture || !mounted[name] || (hidden.has(name) && !all)) continue;
      stale.delete(name);
      setHtml(mounted[name].caption, captionHtml(picture.caption));
      mounted[name].drawing.draw(picture);
    }
    root.dataset.position = last.transport.position;
    clearTimeout(quiet);
    if (opening) opened = setTimeout(mountOthers, APART);
    if (stale.size) quiet = setTimeout(draw, QUIET, 0, true); // out of sight, but somebody may print the page
  }
  const isShown = () => root.dataset.position !== undefined;
  function schedule() { if (!queued) { queued = true; requestAnimationFrame(draw); } }

  function take(message, buffers) {
    if (message.type === "frame") {
      if (!last && !message.whole) return;  // differences for another view of this model; ours is on its way
      const pictures = message.whole ? {} : { ...last.pictures };
      for (const [name, changes] of Object.entries(message.pictures)) {
        pictures[name] = { ...pictures[name], ...changes };
        if (changes.cells) unpackCells((cells[name] ??= {}), pictures[name], buffers);
        stale.add(name);
      }
      last = { ...message, pictures };
      if (transport) transport.marks(message.marks, message.whole);
      if (!isShown()) draw();
      else schedule();
    } else if (message.type === "said" && transport) { transport.say(message.text); schedule(); }
    else if (message.type === "card") ui.cardListeners.forEach((callback) => callback(message.card));
  }
  model.on("msg:custom", take);

  const keys = {
    ArrowLeft: { type: "step", delta: -1 }, ArrowRight: { type: "step", delta: 1 }, Home: { type: "seek", position: 0 }, End: { type: "live" },
    p: { type: "next_preemption" }, Escape: { type: "pin", request: null },
  };
  function onKey(event) {
    if (event.metaKey || event.ctrlKey || event.altKey || event.defaultPrevented) return;
    const key = event.key, inButton = event.target.tagName === "BUTTON";
    if (key === " " && !inButton && last) act({ type: last.transport.playing ? "pause" : "play" });
    else if (key === "t") toggleTheme();
    else if (key === "h" && last) act({ type: "hold", hold: !last.transport.held });
    else if (/^[1-4]$/.test(key)) act({ type: "speed", speed: SPEEDS[key - 1] });
    else if (keys[key] && event.target.tagName !== "INPUT") act(keys[key]);
    else return;
    event.preventDefault(); event.stopPropagation();  // the notebook keeps its own keys for when the focus is elsewhere
  }
  root.addEventListener("keydown", onKey);
  root.addEventListener("pointerdown", () => { if (!root.contains(document.activeElement)) root.focus({ preventScroll: true }); });
  const resized = new ResizeObserver(() => {
    if (width !== (width = root.clientWidth)) { steady?.reset(width); everything(); }
  });
  resized.observe(root);
  const themed = new MutationObserver(() => { applyTheme(); everything(); });
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  themed.observe(document.documentElement, { attributes: true, attributeFilter: ["theme"] });
  act({ type: "hello" });
  return () => { clearTimeout(quiet); clearTimeout(opened); [resized, steady, themed, watched].forEach((one) => one?.disconnect()); transport?.stop(); model.off?.("msg:custom", take); };
}

/** Keep the names of figures that are out of sight in `hidden`: they are drawn when they come near it, not with each frame. */
function watchWhatIsSeen(mounted, hidden, appeared) {
  const nameOf = new Map(Object.entries(mounted).map(([name, { figure }]) => [figure, name]));
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) hidden.delete(nameOf.get(target)); else hidden.add(nameOf.get(target));
    }
    appeared();
  }, { rootMargin: "300px" });
  nameOf.forEach((_, figure) => observer.observe(figure));
  return observer;
}

/** Each part keeps the greatest height it had at this width: what is under the pointer stays there while the engine runs. */
function keepHeights(parts) {
  let width = null;
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const height = target.offsetHeight;
      if (height > (parseFloat(target.style.minHeight) || 0)) target.style.minHeight = `${height}px`;
    }
  });
  parts.forEach((part) => observer.observe(part));
  return {
    reset(newWidth) {
      if (newWidth !== width) parts.forEach((part) => { part.style.minHeight = ""; });
      width = newWidth;
    },
    disconnect() { observer.disconnect(); },
  };
}

/** Bring a picture's cells up to date with what came: `picture.packed` is a Uint32Array of two words a block.
 *
 * `picture.changes` gathers the ids of changed cells until a drawing clears it; null stands for all of them. */
function unpackCells(holder, picture, buffers) {
  const source = buffers[picture.buffer], start = source.byteOffset ?? 0;
  const words = new Uint32Array((source.buffer ?? source).slice(start, start + source.byteLength)); // browsers' machines are little-endian
  if (picture.cells === "all") { holder.packed = words; holder.changes = { ids: null }; }
  else {
    for (let i = 0; i < words.length; i += 3) {
      holder.packed[2 * words[i]] = words[i + 1]; holder.packed[2 * words[i] + 1] = words[i + 2];
      holder.changes.ids?.push(words[i]);
    }
  }
  picture.packed = holder.packed;
  picture.changes = holder.changes;
}
