// The bar of everything, then the pool twice. The layout is that of memory_view_svg.py; where the numbers do not fit beside a
// bar's title they go below it.
{
  const NARROW = 10; // pixels, in which no label has room
  const ALL = 24, BAR = 36, SEPARATOR = " · ";

  function stripes(c, colours, x, y, width, height) {
    c.save(); c.beginPath(); c.rect(x, y, width, height); c.clip();
    for (let k = -height, i = 0; k < width; k += 8, i++) {
      c.fillStyle = colours[i % colours.length]; c.beginPath();
      c.moveTo(x + k, y + height); c.lineTo(x + k + 8, y + height); c.lineTo(x + k + 8 + height, y); c.lineTo(x + k + height, y); c.fill();
    }
    c.restore();
  }

  /** Parts joined into lines that fit. */
  function lines(c, parts, width) {
    const found = [];
    for (const part of parts) {
      const last = found.length ? found[found.length - 1] + SEPARATOR + part : null;
      if (last !== null && c.measureText(last).width <= width) found[found.length - 1] = last; else found.push(part);
    }
    return found;
  }

  function mount(el, ui) {
    const canvas = h("canvas", { tabindex: "0", role: "img" }), key = h("div", { class: "key" }), tip = h("div", { class: "tip" });
    el.append(canvas, key, tip);
    let picture = null, parts = [], chosen = null;
    const faded = (requests) => ui.pinned !== null && ui.pinned !== undefined && !requests.includes(ui.pinned);

    /** A bar's segments: where each begins, how long it is, and how it looks. */
    function segments(bar) {
      const found = [{ kind: "null", slots: picture.null }];
      for (const [letter, request, hue, filled, held, owners] of bar.holders) {
        found.push({ kind: "held", slots: held, letter, requests: [request].flat(), hues: [hue].flat(), filled, owners });
      }
      for (const [kind, slots, label] of bar.rest) found.push({ kind, slots, label });
      let from = 0;
      for (const one of found) { one.from = from; from += one.slots; }
      return found;
    }

    /** What the tip over a segment says. */
    function told(one) {
      if (one.kind === "null") return "<b>null block</b><br>padded rows write here; no sequence owns it";
      if (one.kind !== "held") return `<b>${escapeHtml(one.label)}</b><br>${plural(one.slots, "slot")}, ${plural(one.slots / picture.null, "block")}`;
      const who = `<b>${escapeHtml(one.letter)}</b>${one.owners > 1 ? ` share ${fmt(one.slots / picture.null)} blocks` : ""}`;
      return `${who}<br>${plural(one.filled, "token")} in ${plural(one.slots, "slot")}, ${fmt(one.slots - one.filled)} empty`;
    }

    function drawHeld(c, P, one, x, y, scale) {
      const colours = one.hues.map((hue) => hueOf(P, hue)), filled = one.filled * scale, held = one.slots * scale, gap = held > 2 ? 0.6 : 0;
      c.globalAlpha = faded(one.requests) ? 0.28 : 1;
      const solid = Math.max(0.5, filled - (one.filled === one.slots ? gap : 0));
      if (colours.length > 1) stripes(c, colours, x, y, solid, BAR);
      else { c.fillStyle = colours[0]; c.fillRect(x, y, solid, BAR); }
      if (held - filled >= 0.6) {
        c.fillStyle = mix(colours[0], P.bg, 0.85); c.fillRect(x + filled, y, held - filled - gap, BAR);
        if (held - filled >= 3) hatch(c, x + filled, y, held - filled - gap, BAR, colours[0], 7);
      }
      if (filled < NARROW) { c.globalAlpha = 1; return; }
      c.font = `600 11px ${FONT}`;
      const wide = (s) => c.measureText(s).width, long = one.owners > 1 ? `×${one.owners} ${fmt(one.filled)}` : `${one.letter} ${fmt(one.filled)}`;
      const label = wide(long) + 12 < filled ? long : one.owners === 1 && wide(one.letter) + 8 < filled ? one.letter : "";
      if (label) {
        if (colours.length > 1) { c.fillStyle = P.bg; c.fillRect(x + 4, y + BAR / 2 - 8, wide(label) + 8, 16); }
        drawText(c, label, x + (label === long ? 7 : (filled - wide(label)) / 2), y + BAR / 2 + 0.5, { colour: colours.length > 1 ? P.ink : on(colours[0]), weight: 600 });
      }
      c.globalAlpha = 1;
    }

    function drawRest(c, P, one, x, y, width) {
      if (one.kind === "stranded") { c.fillStyle = P.bg; c.fillRect(x, y, width, BAR); hatch(c, x, y, width, BAR, P.ink3, 7); return; }
      c.fillStyle = one.kind === "null" ? P.ink3 : P[one.kind]; c.fillRect(x, y, Math.max(one.kind === "null" ? 1 : 0, width - 0.6), BAR);
      const weight = one.kind === "cached" ? 600 : 400;
      c.font = `${weight} 11px ${FONT}`;
      if (one.label && c.measureText(one.label).width + 14 < width) drawText(c, one.label, x + 7, y + BAR / 2 + 0.5, { colour: one.kind === "cached" ? P.ink : P.ink2, weight });
    }

    function drawBar(c, P, row, width) {
      const { bar, y, found } = row, scale = width / picture.slots;
      c.fillStyle = P.free; c.fillRect(0, y, width, BAR);
      for (const one of found) {
        const x = one.from * scale;
        if (one.kind === "held") drawHeld(c, P, one, x, y, scale); else drawRest(c, P, one, x, y, one.slots * scale);
      }
      drawText(c, bar.title, 0, row.top + 8, { colour: P.ink, size: 12, weight: 600 });
      const after = c.measureText(bar.title).width + 10;
      drawText(c, bar.note, after, row.top + 8, { colour: P.ink3 });
      if (row.beside) drawText(c, row.lines[0], width, row.top + 8, { colour: P.ink2, align: "right" });
      else row.lines.forEach((line, i) => drawText(c, line, 0, row.top + 25 + 16 * i, { colour: P.ink2 }));
    }

    function drawEverything(c, P, width) {
      const memory = picture.memory, weights = (width * memory.weight_bytes) / memory.total_bytes, [first, second] = memory.labels;
      c.font = `400 11px ${FONT}`;
      const fits = c.measureText(first).width + 16 < weights && c.measureText(second).width + 16 < width - weights;
      drawText(c, memory.title + (fits ? "" : `: ${first}, ${second}`), 0, 7, { colour: P.ink, weight: 600 });
      c.fillStyle = P.cached; c.fillRect(0, 16, weights, ALL);
      c.fillStyle = P.solid; c.fillRect(Math.min(weights, width - 2), 16, Math.max(2, width - weights), ALL);
      if (fits) { drawText(c, first, 8, 16 + ALL / 2, { colour: P.ink }); drawText(c, second, weights + 8, 16 + ALL / 2, { colour: on(P.solid) }); }
      c.strokeStyle = P.ink3; c.lineWidth = 1; c.beginPath();
      c.moveTo(Math.min(weights, width - 2), 16 + ALL); c.lineTo(0.5, 68); c.moveTo(width - 0.5, 16 + ALL); c.lineTo(width - 0.5, 68); c.stroke();
    }

    /** Where each bar stands; the numbers take lines of their own where they do not fit beside the title. */
    function place(width) {
      const c = canvas.getContext("2d");
      let top = picture.memory ? 76 : 0;
      parts = picture.bars.map((bar) => {
        c.font = `600 12px ${FONT}`;
        const title = c.measureText(bar.title).width;
        c.font = `400 11px ${FONT}`;
        const note = c.measureText(bar.note).width, all = bar.numbers.join(SEPARATOR), beside = title + note + c.measureText(all).width + 40 <= width;
        const told = beside ? [all] : lines(c, bar.numbers, width), row = { bar, top, beside, lines: told, found: segments(bar) };
        row.y = top + (beside ? 20 : 20 + 16 * told.length);
        top = row.y + BAR + 14;
        return row;
      });
      return top - 6;
    }

    function paint() {
      const P = ui.palette, width = ui.width, height = place(width), c = context(canvas, width, height);
      if (picture.memory) drawEverything(c, P, width);
      parts.forEach((row) => drawBar(c, P, row, width));
      if (chosen) {
        const row = parts[chosen.row], one = row?.found[chosen.segment];
        if (!one) { chosen = null; tip.style.display = "none"; return; }
        const scale = width / picture.slots, x = one.from * scale;
        c.strokeStyle = P.ink; c.lineWidth = 2; c.strokeRect(x + 1, row.y + 1, Math.max(2, one.slots * scale - 2), BAR - 2);
        tip.innerHTML = told(one); tip.style.display = "block";
        tip.style.left = `${Math.max(0, Math.min(x, width - 250))}px`; tip.style.top = `${row.y + BAR + 6}px`;
      } else tip.style.display = "none";
    }

    const at = (event) => {
      const box = canvas.getBoundingClientRect(), y = event.clientY - box.top, slot = ((event.clientX - box.left) / ui.width) * picture.slots;
      const row = parts.findIndex((one) => y >= one.y && y <= one.y + BAR);
      const segment = row < 0 ? -1 : parts[row].found.findIndex((one) => slot >= one.from && slot < one.from + one.slots);
      return segment < 0 ? null : { row, segment };
    };
    const choose = (next) => { if (next?.row !== chosen?.row || next?.segment !== chosen?.segment) { chosen = next; paint(); } };
    canvas.onmousemove = (event) => { if (picture) choose(at(event)); };
    canvas.onmouseleave = canvas.onblur = () => { if (picture) choose(null); };
    canvas.onclick = (event) => {
      const found = picture && at(event), requests = found ? parts[found.row].found[found.segment].requests ?? [] : [];
      ui.pin(requests.length !== 1 || requests[0] === ui.pinned ? null : requests[0]);
    };
    canvas.onkeydown = (event) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!move || !picture) return;
      const row = Math.max(0, Math.min(parts.length - 1, (chosen?.row ?? 0) + move[0]));
      choose({ row, segment: Math.max(0, Math.min(parts[row].found.length - 1, (chosen ? chosen.segment : -1) + move[1])) });
      event.preventDefault(); event.stopPropagation();
    };

    function drawKey() {
      const P = ui.palette, swatch = (inside) => `<svg viewBox="0 0 14 12" width="14" height="12" aria-hidden="true">${inside}</svg>`, plainFill = (colour) => `<rect width="14" height="12" fill="${colour}"/>`;
      const entries = [
        [plainFill(P.solid), "holds a token"],
        [plainFill(P.solid) + `<path d="M0 6L6 0h5L0 11zM6 12L14 4v5l-3 3z" fill="${P.tint}"/>`, "shared, drawn once"],
        [`<path d="M0 4L4 0M0 9L9 0M2 12L14 0M7 12L14 5M12 12L14 10" stroke="${P.ink3}"/>`, "held, but empty"],
        [plainFill(P.cached), "cached"], [plainFill(P.free), "free"], [plainFill(P.ink3), "null block"],
      ];
      key.innerHTML = entries.map(([inside, label]) => `<span>${swatch(inside)}${label}</span>`).join("") + `<span class="scale">${escapeHtml(picture.scale)}</span>`;
    }

    return {
      draw(next) {
        picture = next;
        canvas.setAttribute("aria-label", captionText(next.caption));
        paint(); drawKey();
      },
    };
  }
  figures.memory_view = { mount };
}
