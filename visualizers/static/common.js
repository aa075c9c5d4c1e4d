// What all figures share: the palette of the theme at hand, small drawing helpers, and the registry of figures.
// A figure registers `figures.NAME = { mount(el, ui) { …; return { draw(picture) {…} } } }`; `ui` is described in shell.js.
const figures = {};

const FONT = 'Inter,"Segoe UI",system-ui,-apple-system,"Helvetica Neue",Arial,sans-serif';
const COLOURS = "bg ink ink2 ink3 rule faint cached free signal solid tint h0 h1 h2 h3 h4 h5 h6 h7 h8".split(" ");

/** The CSS variables of an element as an object of "#rrggbb" strings. */
function readPalette(el) {
  const style = getComputedStyle(el), palette = {};
  for (const name of COLOURS) palette[name] = style.getPropertyValue("--" + name).trim();
  return palette;
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
/** A pure function of strings and numbers that keeps its answers: there are few colours, and many cells. */
const kept = (f) => {
  const known = new Map();
  return (...given) => { const key = given.join(); if (!known.has(key)) known.set(key, f(...given)); return known.get(key); };
};
const mix = kept((a, b, share) => {
  const x = rgb(a), y = rgb(b);
  return "#" + x.map((v, i) => Math.round(v * (1 - share) + y[i] * share).toString(16).padStart(2, "0")).join("");
});
const luminance = (hex) => {
  const [r, g, b] = rgb(hex).map((v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
/** White or near-black, whichever contrasts more on a colour. */
const on = kept((hex) => { const l = luminance(hex) + 0.05; return 1.05 / l > l / 0.0525 ? "#ffffff" : "#111418"; });
const hueOf = (P, number) => P["h" + (number ?? 8)];

const escapeHtml = (s) => String(s).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
/** A whole number with commas. The language's own format takes longer to be made than the first picture may. */
const fmt = (n) => String(n ?? 0).replace(/\B(?=(\d{3})+$)/g, ",");
const plural = (n, what) => `${fmt(n)} ${what}${n === 1 ? "" : "s"}`;
const duration = (s) => (s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(2)} s`);

/** Make an element: h("div", {class: "x"}, child, "text"). */
function h(tag, attributes = {}, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

/** Set an element's HTML, unless that is what it was set to last. */
const WRITTEN = new WeakMap();
function setHtml(el, html) {
  if (WRITTEN.get(el) === html) return;
  WRITTEN.set(el, html);
  el.innerHTML = html;
}

/** Size a canvas in CSS pixels, cleared, and return its 2D context. */
function context(canvas, width, height) {
  const density = Math.max(1, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
  }
  const c = canvas.getContext("2d");
  c.setTransform(density, 0, 0, density, 0, 0);
  c.clearRect(0, 0, width, height);
  c.textBaseline = "middle";
  return c;
}

function drawText(c, s, x, y, { colour, size = 11, weight = 400, align = "left" }) {
  c.font = `${weight} ${size}px ${FONT}`;
  c.fillStyle = colour;
  c.textAlign = align;
  c.fillText(s, x, y);
}

/** Diagonal lines: held, but empty. */
function hatch(c, x, y, width, height, colour, gap = 4) {
  c.save();
  c.beginPath(); c.rect(x, y, width, height); c.clip();
  c.strokeStyle = colour; c.lineWidth = 1; c.beginPath();
  for (let k = -height - ((x + y) % gap); k < width + height; k += gap) { c.moveTo(x + k, y + height); c.lineTo(x + k + height, y); }
  c.stroke(); c.restore();
}

/** A caption's parts, [[text, bold], …], as HTML. */
const captionHtml = (parts) => parts.map(([s, bold]) => (bold ? `<b>${escapeHtml(s)}</b>` : escapeHtml(s))).join("");
const captionText = (parts) => parts.map(([s]) => s).join("");
