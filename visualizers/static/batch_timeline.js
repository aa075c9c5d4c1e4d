// BatchTimeline: one row a sequence, one column a step; below, what each step computed and the blocks after it.
// A base canvas holds the picture; hover, its box and its leader live on a second one above it.
{
  const LEFT = 56, RIGHT = 196, PALE = 0.34, DIM = 0.28, TOKENS = 64, BLOCKS = 56;
  const RUN = 5; // numbers a run: from, to, state, tokens drawn a step, tokens that a prefill computes or drafts that a decode checks
  const WIDE = 900;
  const TIP_ROWS = 10; // room for the sentence at a wait, if there are fewer rows

  /** Where everything stands, in CSS pixels. */
  function layout(p, width) {
    const wide = width >= WIDE, n = p.rows.length;
    const x0 = LEFT, x1 = wide ? width - RIGHT : width - 12, y0 = 22;
    const rh = n <= 24 ? 19 : n <= 36 ? 15 : n <= 48 ? 13 : 11;
    const rowsEnd = y0 + Math.max(n, p.holds.length ? TIP_ROWS : 3) * rh + 8 + (p.num_hidden ? 16 : 0);
    const tokens = rowsEnd + 20, blocks = tokens + TOKENS + 26;
    return { wide, x0, x1, y0, rh, h: rh - (rh > 15 ? 5 : rh > 11 ? 3 : 2), w: (x1 - x0) / p.columns, rowsEnd, tokens, blocks, legend: blocks + BLOCKS + 22 };
  }

  /** One run of a row: `cells` steps of width `w` from x on. */
  function mark(c, P, hue, run, x, y, w, cells, h, most) {
    const gap = w > 4 ? 1 : 0, width = w * cells, middle = y + h / 2;
    const each = (fill, top, height, less) => {
      if (!gap || cells === 1) { c.fillStyle = fill; return c.fillRect(x, top, width - (gap ? less : 0), height); }
      c.strokeStyle = fill; c.lineWidth = height; c.setLineDash([w - less, less]);
      c.beginPath(); c.moveTo(x, top + height / 2); c.lineTo(x + width, top + height / 2); c.stroke();
      c.setLineDash([]);
    };
    if (run.state === "prefill") each(hue, y, h, 0.5);
    else if (run.state === "decode") { const tall = Math.max(1, (h * run.drawn) / Math.max(2, most)); each(mix(hue, P.bg, 0.36), y + h - tall, tall, 1); }
    else if (run.state === "waiting" || run.state === "idle") { c.fillStyle = P.ink3; c.fillRect(x, middle - 0.5, width, 1); }
    else if (run.state === "queued") { c.fillStyle = P.signal; for (let q = 0; q < width; q += 4) c.fillRect(x + q, middle - 0.5, Math.min(2, width - q), 1); }
    else if (run.state === "swapped") { c.fillStyle = hue; c.fillRect(x, y + h * 0.22, width, 1.5); c.fillRect(x, y + h * 0.7, width, 1.5); }
    else if (run.state === "padding") { c.fillStyle = P.faint; c.fillRect(x, y + h * 0.25, width, h * 0.75); hatch(c, x, y + h * 0.25, width, h * 0.75, P.ink3, 3); }
  }

  function triangle(c, colour, x, y, size) {
    c.fillStyle = colour;
    c.beginPath(); c.moveTo(x - size, y - size * 0.6); c.lineTo(x + size, y - size * 0.6); c.lineTo(x, y + size * 1.2); c.fill();
  }

  /** The end of a sequence: a bar, and a ring, a cross if it was aborted, a dot if it failed. */
  function endMark(c, P, reason, x, y, h) {
    c.fillStyle = c.strokeStyle = P.ink; c.lineWidth = 1.2;
    c.fillRect(x - 1, y - 1, 1.5, h + 2);
    const cx = x + 4, cy = y + h / 2;
    c.beginPath();
    if (reason === "abort") { c.moveTo(cx - 2, cy - 2); c.lineTo(cx + 2, cy + 2); c.moveTo(cx + 2, cy - 2); c.lineTo(cx - 2, cy + 2); c.stroke(); }
    else { c.arc(cx, cy, 2, 0, 7); reason === "error" ? c.fill() : c.stroke(); }
  }

  const runOf = (p, row, at) => ({ from: row.runs[at], to: row.runs[at + 1], state: p.states[row.runs[at + 2]], drawn: row.runs[at + 3], computed: row.runs[at + 4] });

  /** The run of a row in a column, or null. */
  function runAt(p, row, column) {
    for (let i = 0; i < row.runs.length; i += RUN) if (row.runs[i] <= column && column < row.runs[i + 1]) return runOf(p, row, i);
    return null;
  }

  function paintRow(c, P, p, g, row, index, strength) {
    const y = g.y0 + index * g.rh, X = (column) => g.x0 + (column - p.first) * g.w, hue = hueOf(P, row.hue), now = p.position + 1;
    for (let i = 0; i < row.runs.length; i += RUN) {
      const run = runOf(p, row, i);
      for (const [from, to, pale] of [[run.from, Math.min(run.to, now), 1], [Math.max(run.from, now), run.to, PALE]]) {
        if (from >= to) continue;
        c.globalAlpha = pale * strength;
        mark(c, P, hue, run, X(from), y, g.w, to - from, g.h, p.most_drawn);
      }
    }
    const at = (column) => { c.globalAlpha = (column > p.position ? PALE : 1) * strength; };
    c.fillStyle = P.bg;
    for (const k of row.hits) { at(k); const inset = Math.min(2, g.w / 5); c.fillStyle = P.bg; c.fillRect(X(k) + inset, y + g.h / 2 - 1, Math.max(1, g.w - 2 * inset - 0.5), 2); }
    if (row.forked !== null) {
      at(row.forked);
      const from = row.parent === null ? y - g.rh + g.h / 2 : g.y0 + row.parent * g.rh + g.h / 2;
      c.strokeStyle = hue; c.lineWidth = 1.5;
      c.beginPath(); c.moveTo(X(row.forked), from); c.lineTo(X(row.forked), y + g.h / 2); c.lineTo(X(row.forked) + 3, y + g.h / 2); c.stroke();
    }
    if (row.end) { at(row.end[1]); endMark(c, P, row.end[2], X(row.end[0]), y, g.h); }
    for (const k of row.preempted) { c.globalAlpha = k > p.position ? PALE : 1; triangle(c, P.signal, X(k) + g.w / 2, y, Math.min(5, g.h * 0.36)); }
    c.globalAlpha = 1;
  }

  function paintNames(c, P, p, g, pinned) {
    p.rows.forEach((row, index) => {
      const y = g.y0 + index * g.rh, middle = y + g.h / 2, size = g.rh > 13 ? 12 : 10;
      c.fillStyle = hueOf(P, row.hue); c.fillRect(0, y + 1, 4, g.h - 2);
      drawText(c, row.letter, 10, middle, { colour: P.ink, size, weight: row.request === pinned ? 800 : 600 });
      if (!g.wide) return;
      const right = (s, x) => drawText(c, s, g.x1 + x, middle, { colour: P.ink, size: Math.min(11, size), align: "right" });
      right(row.waited === null ? "" : fmt(row.waited), 62);
      right(row.first_token === null ? "" : duration(row.first_token), 132);
      right(fmt(row.tokens), 186);
    });
    if (g.wide) [["waited", 62], ["first token", 132], ["tokens", 186]].forEach(([s, x]) => drawText(c, s, g.x1 + x, g.y0 - 12, { colour: P.ink3, size: 10, align: "right" }));
    if (p.num_hidden) drawText(c, `and ${plural(p.num_hidden, "more sequence")} at this step, not drawn`, g.x0, g.rowsEnd - 8, { colour: P.ink2, size: 11 });
  }

  function paintAxis(c, P, p, g) {
    for (const [column, step] of p.ticks) {
      const x = g.x0 + (column - p.first) * g.w;
      c.fillStyle = P.rule; c.fillRect(x, g.y0 - 4, 1, g.blocks + BLOCKS - g.y0 + 4);
      drawText(c, fmt(step), x, g.y0 - 12, { colour: P.ink3, size: 10, align: "center" });
    }
  }

  /** A small chart under the rows: stacked series over the columns, `top` at its full height. */
  function paintBand(c, P, p, g, y, height, title, below, topText, top, series) {
    drawText(c, title, 0, y + 6, { colour: P.ink, weight: 600 });
    drawText(c, below, 0, y + 20, { colour: P.ink2 });
    c.fillStyle = P.ink3; c.fillRect(g.x0, y, g.x1 - g.x0, 1);
    const width = title === "tokens" && g.w > 3 ? g.w - 1 : g.w + 0.3, now = Math.max(0, Math.min(p.steps.length, p.position + 1 - p.first));
    const bottoms = p.steps.map(() => y + height);
    for (const [values, fill, lines] of series) {
      const paths = [new Path2D(), new Path2D()]; // one fill each, so that neighbours have no seam
      values.forEach((value, k) => { const tall = (value / top) * height; bottoms[k] -= tall; if (tall) paths[k < now ? 0 : 1].rect(g.x0 + k * g.w, bottoms[k], width, tall); });
      paths.forEach((path, future) => {
        c.save();
        c.globalAlpha = future ? PALE : 1; c.fillStyle = fill; c.fill(path);
        if (lines) { c.clip(path); hatch(c, g.x0, y, g.x1 - g.x0, height, lines, 3); }
        c.restore();
      });
    }
    c.globalAlpha = 1;
    if (g.wide) { drawText(c, topText, g.x1 + 8, y, { colour: P.ink2 }); drawText(c, "0", g.x1 + 8, y + height, { colour: P.ink3, size: 10 }); }
    else drawText(c, topText, g.x1, y - 8, { colour: P.ink2, align: "right" });
  }

  function swatch(c, x, y, fill, lines) { c.fillStyle = fill; c.fillRect(x, y, 9, 9); if (lines) hatch(c, x, y, 9, 9, lines, 3); }

  function paintBands(c, P, p, g) {
    const low = p.most_tokens * 5 < p.budget, top = low ? Math.max(1, p.most_tokens) * 1.25 : p.budget;
    const tokens = [[p.tokens.decode, P.tint], [p.tokens.padding, P.faint, P.ink3], [p.tokens.prefill, P.solid]];
    const blocks = [[p.blocks.owned, P.solid], [p.blocks.shared, P.tint, P.solid], [p.blocks.cached, P.cached]];
    paintBand(c, P, p, g, g.tokens, TOKENS, "tokens", "a step", low ? `${fmt(Math.round(top))}; the budget is ${fmt(p.budget)}` : `${fmt(p.budget)} budget`, top, tokens);
    paintBand(c, P, p, g, g.blocks, BLOCKS, "blocks", "in use", plural(p.num_blocks, "block"), p.num_blocks, blocks);
    if (g.wide) for (const [dx, y, fill, lines, s] of keys(P, p, g)) { swatch(c, g.x1 + 8 + dx, y, fill, lines); drawText(c, s, g.x1 + 22 + dx, y + 5, { colour: P.ink2 }); }
  }

  /** What the bands' colours mean: [x, y, fill, hatching, text] right of them. */
  function keys(P, p, g) {
    const found = [[0, g.tokens + 18, P.solid, null, "prefill"], [0, g.tokens + 34, P.tint, null, "decode"], [0, g.blocks + 18, P.solid, null, "one owner"],
      [0, g.blocks + 34, P.tint, P.solid, "shared"], [80, g.blocks + 18, P.cached, null, "cached"]];
    return p.tokens.padding.some((n) => n) ? [...found, [80, g.tokens + 18, P.faint, P.ink3, "for nobody"]] : found;
  }

  /** The legend of forms, placed in lines; what is rare is only explained where it is in sight. */
  function legend(c, P, p, g) {
    const has = (state) => p.rows.some((row) => row.runs.some((v, i) => i % RUN === 2 && p.states[v] === state)), ended = (why) => p.rows.some((row) => row.end && row.end[2] === why);
    const cell = (state) => (x, y) => mark(c, P, P.h0, { state, drawn: 1 }, x, y, 16, 1, 12, p.most_drawn), end = (why) => (x, y) => endMark(c, P, why, x + 6, y, 12);
    const items = [
      ["waiting", cell("waiting")],
      ["prefill chunk", cell("prefill")],
      ["prefill after a prefix hit", (x, y) => { cell("prefill")(x, y); c.fillStyle = P.bg; c.fillRect(x + 3, y + 5, 10, 2); }],
      [p.most_drawn > 1 ? "decode, height = tokens that round" : "decode, one token a step",
        (x, y) => [1, p.most_drawn, Math.ceil(p.most_drawn / 2)].forEach((drawn, i) => mark(c, P, P.h0, { state: "decode", drawn }, x + i * 5.4, y, 5.4, 1, 12, p.most_drawn))],
      ["preempted", (x, y) => triangle(c, P.signal, x + 8, y + 4, 5)],
      ["recompute: queued again", cell("queued")],
      ["finished", end("stop")],
    ];
    if (has("swapped")) items.push(["swapped out", cell("swapped")]);
    if (has("padding")) items.push(["computed after its end, for nobody", cell("padding")]);
    if (ended("abort")) items.push(["aborted", end("abort")]);
    if (ended("error")) items.push(["failed", end("error")]);
    if (!g.wide) for (const [, , fill, lines, s] of keys(P, p, g)) items.push([s, (x, y) => swatch(c, x + 6, y + 1, fill, lines)]);
    let x = g.x0, y = g.legend;
    c.font = `400 11px ${FONT}`;
    return items.map(([text, demo]) => {
      const width = c.measureText(text).width + 42;
      if (x + width - 20 > g.x1 + (g.wide ? RIGHT : 0) && x > g.x0) { x = g.x0; y += 20; }
      x += width;
      return { text, demo, x: x - width, y };
    });
  }

  function paint(canvas, P, p, g, width, height, items, pinned) {
    const c = context(canvas, width, height);
    paintAxis(c, P, p, g);
    paintNames(c, P, p, g, pinned);
    p.rows.forEach((row, index) => paintRow(c, P, p, g, row, index, pinned === null || row.request === pinned ? 1 : DIM));
    paintBands(c, P, p, g);
    for (const item of items) { item.demo(item.x, item.y - 6); drawText(c, item.text, item.x + 22, item.y, { colour: P.ink2 }); }
    if (!p.steps.length) drawText(c, "no requests yet", (g.x0 + g.x1) / 2, g.y0 + g.rh, { colour: P.ink3, align: "center" });
    const x = g.x0 + (Math.max(p.position + 1, p.first) - p.first) * g.w;
    c.fillStyle = P.ink; c.fillRect(x - 0.5, g.y0 - 5, 1.2, g.blocks + BLOCKS - g.y0 + 5);
    c.beginPath(); c.moveTo(x - 4, g.y0 - 9); c.lineTo(x + 4, g.y0 - 9); c.lineTo(x, g.y0 - 3); c.fill();
  }

  /** The whole log as a grid of merged states, with the window that is shown below. Returns its geometry. */
  function paintOverview(canvas, P, p, g, width) {
    const o = p.overview, lh = o.lines.length <= 12 ? 6 : o.lines.length <= 32 ? 3 : 2, high = Math.max(54, o.lines.length * lh), y0 = 16;
    const c = context(canvas, width, high + y0 + 14), k = (g.x1 - g.x0) / o.length, bin = o.steps_per_bin * k;
    const fills = { waiting: mix(P.tint, P.bg, 0.62), idle: mix(P.tint, P.bg, 0.62), padding: P.cached, decode: P.tint, prefill: P.solid, queued: mix(P.signal, P.bg, 0.6), swapped: mix(P.signal, P.bg, 0.6), preempted: P.signal };
    drawText(c, "whole", 0, y0 + 6, { colour: P.ink, weight: 600 });
    drawText(c, "log", 0, y0 + 20, { colour: P.ink2 });
    o.lines.forEach((runs, line) => {
      let at = 0;
      for (let i = 0; i < runs.length; i += 2) {
        const fill = fills[p.states[runs[i]]], x = g.x0 + at * bin;
        at += runs[i + 1];
        if (fill) { c.fillStyle = fill; c.fillRect(x, y0 + line * lh, Math.max(1.5, Math.min(g.x1 - x, runs[i + 1] * bin)), lh); }
      }
    });
    const x = g.x0 + p.first * k, w = Math.min(p.columns * k, g.x1 - x);
    c.strokeStyle = P.ink; c.lineWidth = 1.5; c.strokeRect(x, y0 - 3, Math.max(3, w), high + 6);
    c.fillStyle = P.ink; c.fillRect(g.x0 + (p.position + 1) * k - 0.5, y0 - 6, 1.2, high + 12);
    drawText(c, "0", g.x0, 6, { colour: P.ink3, size: 10, align: "center" });
    drawText(c, `step ${fmt(o.last_step)}`, g.x1, 6, { colour: P.ink3, size: 10, align: "right" });
    if (!g.wide) return k;
    drawText(c, `${plural(o.num_rows, "sequence")}${o.rows_per_line > 1 ? `, ${o.rows_per_line} a line` : ""}`, g.x1 + 8, y0 + 4, { colour: P.ink2 });
    [["waiting", "waiting"], ["decode", "decode"], ["prefill", "prefill"], ["queued", "queued again"], ["preempted", "preempted"]].forEach(([state, s], i) => {
      const sx = g.x1 + 8 + (i > 2 ? 80 : 0), sy = y0 + 14 + (i % 3) * 15;
      swatch(c, sx, sy, fills[state]); drawText(c, s, sx + 14, sy + 5, { colour: P.ink2 });
    });
    return k;
  }

  /** Why a row is what it is in a column: [sentence, the step that told it, whether it is for memory]. */
  function reason(p, row, column, state) {
    const own = row.reasons.filter(([at]) => at <= column), here = own.filter(([at]) => at === column), last = own[own.length - 1];
    if (["waiting", "queued", "swapped"].includes(state)) {
      if (state === "queued" && here.length) return [here[here.length - 1][2], here[0][1]];
      const hold = p.holds.filter(([since, until]) => since <= column && (until === null || column < until)).pop();
      if (hold) return [hold[2] === row.letter ? hold[3] : `is behind ${hold[2]}, which ${hold[3]}`, hold[4], hold[5]];
      return last ? [last[2], last[1]] : null;
    }
    if (here.length) return [here.slice(-2).map((entry) => entry[2]).join("; "), here[0][1]];
    return state === "idle" && last ? [last[2], last[1]] : null;
  }

  /** A decode's tokens. The one step that ends a sequence may keep none behind its accepted drafts. */
  function decodes(row, run, column) {
    if (!run.computed) return ` draws ${plural(run.drawn, "token")}`;
    const ends = row.end && row.end[1] === column;
    return ` decodes 1 + ${plural(run.computed, "draft")}, ${ends ? `${plural(run.drawn, "token")} kept` : `${fmt(Math.max(0, run.drawn - 1))} accepted`}`;
  }

  function tipHtml(p, row, column) {
    const run = runAt(p, row, column), k = column - p.first, step = p.steps[k];
    if (!run) return null;
    const why = reason(p, row, column, run.state), used = p.blocks.owned[k] + p.blocks.shared[k];
    const verb = { follows: " waits for its prompt, which another sample computes", idle: " holds a slot and is not computed", padding: " is computed after its end, for nobody",
      decode: decodes(row, run, column), prefill: ` computes ${plural(run.computed, "known token")}` }[run.state] ?? "";
    const notes = why && why[1] !== step ? [`so told in step ${fmt(why[1])}`] : [];
    if (why && why[2]) notes.push("blocks that running sequences still need are left out");
    const note = notes.length ? notes.join("; ") : `${fmt(used)} of ${plural(p.num_blocks, "block")} in use, ${fmt(p.num_blocks - used)} can be taken`;
    return `<b>${escapeHtml(row.letter)}</b>${verb}, step ${fmt(step)}${why ? `<br><b>${escapeHtml(why[0])}</b>` : ""}<br><span>${note}</span>`;
  }

  /** The columns that stand at the right where there is room. */
  function tables(p) {
    const half = p.rows.length > 8 ? Math.ceil(p.rows.length / 2) : p.rows.length, rows = p.rows.map((row) =>
      `<tr><td>${escapeHtml(row.letter)}</td><td>${row.waited === null ? "" : fmt(row.waited)}</td><td>${row.first_token === null ? "" : duration(row.first_token)}</td><td>${fmt(row.tokens)}</td></tr>`);
    return [rows.slice(0, half), rows.slice(half)].filter((part) => part.length)
      .map((part) => `<table><tr><th>sequence</th><th>waited</th><th>first token</th><th>tokens</th></tr>${part.join("")}</table>`).join("");
  }

  figures.batch_timeline = {
    title: "BatchTimeline",
    question: "Why did this request wait?",
    mount(el, ui) {
      const whole = h("canvas", { class: "tl-whole", "aria-hidden": "true" }), base = h("canvas", { tabindex: "0", role: "img" }), over = h("canvas", { class: "over", "aria-hidden": "true" });
      const tip = h("div", { class: "tip tl-tip" }), box = h("div", { class: "tl" }, base, over, tip), below = h("div", { class: "tl-below" });
      el.append(whole, box, below);
      let p = null, g = null, size = [0, 0], perStep = 1, hover = null, cursor = null;

      /** The cell of the row that the arrow keys chose: at the playhead, or the nearest step in which it is there. */
      function chosen() {
        const runs = p.rows[cursor ?? -1]?.runs;
        return runs?.length ? { row: cursor, column: Math.max(runs[0], Math.min(p.position, runs[runs.length - RUN + 1] - 1)) } : null;
      }

      function point() {
        const c = context(over, ...size), at = hover ?? chosen() ?? p.tip;
        const html = at ? tipHtml(p, p.rows[at.row], at.column) : null;
        tip.style.display = html ? "block" : "none";
        if (!html) return;
        tip.innerHTML = html;
        const P = ui.palette, x = g.x0 + (at.column - p.first + 0.5) * g.w, y = g.y0 + at.row * g.rh + g.h / 2, w = tip.offsetWidth, tall = tip.offsetHeight, resting = at === p.tip;
        const leftFree = resting && x - g.x0 - 34 > w, left = Math.max(2, leftFree ? g.x0 + 14 : x + 16 + w <= size[0] ? x + 14 : x - 14 - w), top = tipTop(y, tall, resting);
        tip.style.left = left + "px"; tip.style.top = top + "px";
        c.strokeStyle = P.ink; c.lineWidth = 1;
        c.strokeRect(x - g.w / 2 - 1.5, y - g.h / 2 - 2, g.w + 3, g.h + 4);
        if (leftFree) { c.beginPath(); c.moveTo(x, y + g.h / 2 + 2); c.lineTo(x, top + 20); c.lineTo(left + w, top + 20); c.stroke(); }
      }

      /** On the rows, below the cell or above it, never on the charts: what a step computed is part of why. */
      function tipTop(y, tall, resting) {
        const end = g.rowsEnd + 12 - tall, above = y - g.h / 2 - 6 - tall;
        const below = [y + (resting ? 2.4 * g.rh : 14), y + 14].find((top) => top <= end);
        return below ?? (above >= 4 ? above : Math.max(0, end));
      }

      const find = (event) => {
        const r = base.getBoundingClientRect(), x = event.clientX - r.left, y = event.clientY - r.top;
        const row = Math.floor((y - g.y0) / g.rh), column = p.first + Math.floor((x - g.x0) / g.w);
        return { row: row >= 0 && row < p.rows.length ? row : null, column: x >= g.x0 && column < p.last ? column : null };
      };
      const pin = (row) => ui.pin(p.rows[row].request === ui.pinned ? null : p.rows[row].request);
      base.addEventListener("mousemove", (event) => { const at = find(event); hover = at.row !== null && at.column !== null && runAt(p, p.rows[at.row], at.column) ? at : null; point(); });
      base.addEventListener("mouseleave", () => { hover = null; point(); });
      base.addEventListener("click", (event) => {
        const at = find(event);
        if (at.row !== null && (at.column === null || p.rows[at.row].request !== ui.pinned)) pin(at.row);
        if (at.column !== null) ui.seek(at.column);
      });
      base.addEventListener("keydown", (event) => {
        const delta = { ArrowUp: -1, ArrowDown: 1 }[event.key];
        if (delta && p.rows.length) cursor = Math.max(0, Math.min(p.rows.length - 1, (cursor ?? (delta > 0 ? -1 : p.rows.length)) + delta));
        else if (event.key === "Enter" && cursor !== null) pin(cursor);
        else return;
        event.preventDefault(); event.stopPropagation(); point();
      });
      base.addEventListener("blur", () => { cursor = null; if (p) point(); });
      whole.addEventListener("click", (event) => {
        const column = Math.floor((event.clientX - whole.getBoundingClientRect().left - g.x0) / perStep);
        if (column >= 0 && column < p.overview.length) ui.seek(column);
      });

      return {
        draw(picture) {
          if (hover && picture.rows[hover.row]?.letter !== p.rows[hover.row].letter) hover = null;
          p = picture;
          const P = ui.palette, width = ui.width;
          g = layout(p, width);
          const items = legend(base.getContext("2d"), P, p, g);
          size = [width, items[items.length - 1].y + 10];
          whole.style.display = p.overview ? "block" : "none";
          if (p.overview) perStep = paintOverview(whole, P, p, g, width);
          paint(base, P, p, g, ...size, items, ui.pinned);
          base.setAttribute("aria-label", captionText(p.caption));
          below.innerHTML = g.wide ? "" : tables(p);
          point();
        },
      };
    },
  };
}
