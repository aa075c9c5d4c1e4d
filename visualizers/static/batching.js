// Static and continuous batching: two runs as small multiples on one scale.
{
  const X0 = 34, GAP = 40, TOP = 24, RUN = 5, PALE = 0.34, DIM = 0.28;

  const pitch = (rows) => Math.max(2, Math.min(10, Math.floor(320 / Math.max(1, rows))));

  /** How a state looks in a row `tall` pixels high: [top, height, fill, hatched]. */
  function form(state, P, hue, tall) {
    const thick = Math.max(1, tall - 2.5), middle = tall / 2 - 0.5;
    return {
      waiting: [middle, 0.8, P.ink3], idle: [middle, 0.8, P.ink3], queued: [middle, 0.8, P.signal], swapped: [middle - 1, 3, mix(hue, P.bg, 0.5)],
      padding: tall >= 6 ? [tall * 0.25, tall / 2, P.bg, P.ink3] : [tall * 0.25, tall / 2, P.cached],
      prefill: [tall - thick - 1, thick, hue], decode: [tall - thick - 1, thick, mix(hue, P.bg, 0.3)],
    }[state];
  }

  function paintRuns(c, P, p, side, g, strength) {
    for (let state = 1; state < p.states.length; state++) { // by priority: where steps share a pixel, the higher state is on top
      side.rows.forEach((row, index) => {
        const look = form(p.states[state], P, hueOf(P, row.hue), g.tall), now = side.position + 1;
        for (let i = 0; look && i < row.runs.length; i += RUN) {
          if (row.runs[i + 2] !== state) continue;
          const [from, to] = [row.runs[i], row.runs[i + 1]];
          for (const [a, b, pale] of [[from, Math.min(to, now), 1], [Math.max(from, now), to, PALE]]) {
            if (a >= b) continue;
            const x = X0 + a * g.w, y = TOP + index * g.tall + look[0], width = Math.max(0.6, (b - a) * g.w + 0.2);
            c.globalAlpha = pale * strength(row);
            c.fillStyle = look[2]; c.fillRect(x, y, width, look[1]);
            if (look[3]) hatch(c, x, y, width, look[1], look[3], 3);
          }
        }
      });
    }
    c.globalAlpha = 1;
  }

  function paintMarks(c, P, side, g) {
    c.fillStyle = P.signal;
    side.rows.forEach((row, index) => {
      for (const at of row.preempted) {
        const x = X0 + (at + 0.5) * g.w, y = TOP + index * g.tall;
        c.globalAlpha = at > side.position ? PALE : 1;
        if (g.tall < 8) { c.fillRect(x - 0.75, y, 1.5, g.tall); continue; }
        c.beginPath(); c.moveTo(x - 3, y - 1); c.lineTo(x + 3, y - 1); c.lineTo(x, y + 4); c.fill();
      }
    });
    c.globalAlpha = 1;
  }

  function paint(canvas, P, p, side, width, pinned) {
    const tall = pitch(p.rows), bottom = TOP + p.rows * tall, g = { tall, w: (width - X0 - 8) / p.columns }, c = context(canvas, width, bottom + 40), title = side.name[0].toUpperCase() + side.name.slice(1);
    drawText(c, title, X0, 8, { colour: P.ink, size: 12, weight: 620 });
    drawText(c, side.how, X0 + c.measureText(title).width + 8, 8, { colour: P.ink2 });
    for (let k = 0; k <= p.columns; k += p.every) {
      c.fillStyle = P.rule; c.fillRect(X0 + k * g.w, TOP, 1, bottom - TOP + 4);
      drawText(c, fmt(k), X0 + k * g.w, bottom + 12, { colour: P.ink3, size: 10, align: "center" });
    }
    paintRuns(c, P, p, side, g, (row) => (pinned === null || row.request === pinned ? 1 : DIM));
    paintMarks(c, P, side, g);
    if (tall >= 9) side.rows.forEach((row, index) => row.first && drawText(c, row.letter.split("·")[0], X0 - 8, TOP + index * tall + tall / 2, { colour: row.request === pinned ? P.ink : P.ink2, size: 10, weight: row.request === pinned ? 700 : 400, align: "right" }));
    c.fillStyle = P.ink; c.fillRect(X0 + (side.position + 1) * g.w, TOP, 1.3, bottom - TOP + 2);
    drawText(c, side.told, X0, bottom + 30, { colour: P.ink, size: 12, weight: 620 });
    const note = side.num_hidden ? `${side.note}; ${plural(side.num_hidden, "more sequence")} not drawn` : side.note;
    drawText(c, note, X0 + c.measureText(side.told).width + 16, bottom + 30, { colour: P.ink2 });
    return g;
  }

  figures.batching = {
    title: "Static and continuous batching",
    question: "What does waiting for the longest answer cost?",
    mount(el, ui) {
      const box = h("div", { class: "sides" }), tip = h("div", { class: "tip" });
      el.append(box, tip);
      el.style.position = "relative";
      let p = null, views = [];

      function at(view, event) {
        const r = view.canvas.getBoundingClientRect(), column = Math.floor((event.clientX - r.left - X0) / view.g.w), row = Math.floor((event.clientY - r.top - TOP) / view.g.tall);
        const side = p.sides[view.index];
        return column >= 0 && column < side.length && side.rows[row] ? { side, row: side.rows[row], column } : null;
      }

      /** What a row does in the column pointed at, and since when. */
      function point(view, event) {
        const found = at(view, event), words = { waiting: "waits", idle: "holds a slot and is not computed", queued: "waits to be recomputed", swapped: "waits on the host", padding: "has ended; its row is computed for nobody", prefill: "has its prompt computed", decode: "decodes", follows: "waits for its prompt" };
        let shown = "";
        for (let i = 0; found && i < found.row.runs.length; i += RUN) {
          const [from, to, state] = found.row.runs.slice(i, i + 3);
          if (from <= found.column && found.column < to) shown = `<b>${escapeHtml(found.row.letter)}</b> ${words[p.states[state]]}, steps ${fmt(from)} to ${fmt(to - 1)} of the run`;
        }
        tip.style.display = shown ? "block" : "none";
        tip.innerHTML = shown;
        const outer = el.getBoundingClientRect();
        tip.style.left = Math.min(event.clientX - outer.left + 14, outer.width - tip.offsetWidth - 4) + "px";
        tip.style.top = event.clientY - outer.top + 14 + "px";
      }

      function mountSide(index) {
        const canvas = h("canvas", { tabindex: "0", role: "img" }), view = { canvas, index, g: null };
        canvas.addEventListener("mousemove", (event) => point(view, event));
        canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
        canvas.addEventListener("click", (event) => { const found = at(view, event); if (found) ui.pin(found.row.request === ui.pinned ? null : found.row.request); });
        box.append(canvas);
        return view;
      }

      return {
        draw(picture) {
          p = picture;
          while (views.length < p.sides.length) views.push(mountSide(views.length));
          const wide = ui.width >= 900, width = wide ? (ui.width - GAP * (p.sides.length - 1)) / p.sides.length : ui.width;
          box.style.gridTemplateColumns = wide ? `repeat(${p.sides.length}, 1fr)` : "1fr";
          views.forEach((view) => {
            const side = p.sides[view.index];
            view.g = paint(view.canvas, ui.palette, p, side, Math.floor(width), ui.pinned);
            view.canvas.setAttribute("aria-label", `${side.name}: ${side.told}, ${side.note}. ${captionText(p.caption)}`);
          });
        },
      };
    },
  };
}
