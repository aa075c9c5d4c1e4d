// Copy-on-write in three panels: tables above, the blocks that they point at below. Before the first copy one panel of tables.
// The layout is that of block_tables_svg.py.
{
  const GAP = 32, TABLE_Y = 18, CELL = 20, BLOCK_Y = 96, BLOCK = 46, HEIGHT = 180, ELLIPSIS = 14, EDGE = 4;

  /** The entries of a table to draw: all, or the first and the last. */
  function pick(table, capacity, withEllipsis) {
    const entries = table.entries;
    if (entries.length <= capacity && table.length === entries.length) return entries;
    const head = Math.max(0, Math.min(capacity, withEllipsis, entries.length) - 1);
    return [...entries.slice(0, head), entries[entries.length - 1]];
  }

  /** [index, block id, x] of each entry, the places of ellipses, and the width of it all. */
  function cells(table, entries, left, width) {
    const placed = [], dots = [];
    let x = left, before = -1;
    for (const [index, id] of entries) {
      if (index > before + 1) { dots.push(x + ELLIPSIS / 2); x += ELLIPSIS; }
      placed.push([index, id, x]);
      x += width; before = index;
    }
    if (before < table.length - 1) { dots.push(x + ELLIPSIS / 2); x += ELLIPSIS; }
    return { table, cells: placed, dots, left, width: x - left };
  }

  /** Where tables and blocks stand: as many entries of each table as fit, the last one always. */
  function layout(panel, width) {
    const { tables, blocks } = panel, digits = String(Math.max(...blocks.map((b) => b.id))).length;
    const cell = Math.max(22, 6.2 * digits + 8), least = Math.max(34, 7 * digits + 8);
    const each = (width - 16 * (tables.length - 1)) / tables.length;
    const always = blocks.filter((b) => b.ring === "copy" || b.references === 0).map((b) => b.id);
    let shown, ids;
    for (let capacity = Math.max(1, Math.floor(each / cell)); capacity > 0; capacity--) {
      shown = tables.map((table) => pick(table, capacity, Math.floor((each - ELLIPSIS) / cell)));
      const wanted = new Set([...shown.flat().map(([, id]) => id), ...always]);
      ids = blocks.filter((b) => wanted.has(b.id)).map((b) => b.id);
      const leftOut = shown.flatMap((entries) => entries.filter(([index], i) => index > (i ? entries[i - 1][0] : -1) + 1)).length;
      if ((ids.length + 0.5 * leftOut) * least <= width) break;
    }
    const gaps = new Map();
    const copy = blocks.find((b) => b.ring === "copy")?.id;
    for (const entries of shown) entries.forEach(([index, id], i) => { if (!gaps.has(id)) gaps.set(id, id === copy ? 0 : index - (i ? entries[i - 1][0] : -1) - 1); });
    let unit = -1;
    const units = ids.map((id, i) => (unit = (i ? unit + 1 : 0) + (gaps.get(id) > 0 ? 0.5 : 0)));
    const widths = tables.map((table, i) => cells(table, shown[i], 0, cell).width);
    const between = Math.min(96, (width - widths.reduce((a, b) => a + b, 0)) / Math.max(1, tables.length - 1));
    let x = 0;
    const placed = tables.map((table, i) => { const one = cells(table, shown[i], x, cell); x += widths[i] + between; return one; });
    const wide = Math.min(56, (width + 6) / (unit + 1) - 6), pitch = Math.min(96, (width - wide) / Math.max(1, unit));
    return { cell, wide, tables: placed, blocks: new Map(ids.map((id, i) => [id, units[i] * pitch])), gaps, space: 1.5 * pitch - wide };
  }

  function mount(el, ui) {
    const panels = h("div", { class: "panels", role: "group" }), tokens = h("div", { class: "tokens" }), swapped = h("div", { class: "swapped" }), tip = h("div", { class: "tip" });
    el.append(panels, tokens, swapped, tip);
    let picture = null, views = [], flash = 1, flashed = null, drawnAt = 0, pointed = null;
    const dim = (table) => (ui.pinned === null || ui.pinned === undefined || table.request === ui.pinned ? 1 : 0.28);

    function curve(c, P, view, row, [index, id, left]) {
      const { panel, place } = view, table = panel.tables[row], block = view.byId.get(id), n = panel.tables.length;
      const strong = panel.strong === null ? block.references > 1 : index === panel.strong, chosen = pointed?.view === view && pointed.id === id;
      const to = place.blocks.get(id) + place.wide / 2 + (row - (n - 1) / 2) * Math.min(9, place.wide / (n + 1));
      const x = left + place.cell / 2, y = TABLE_Y + CELL, mid = (y + BLOCK_Y) / 2;
      const colour = index === table.hot && block.ring === "copy" ? P.signal : strong ? hueOf(P, table.hue) : chosen ? P.ink : P.cached;
      return { strong: strong + 2 * chosen, paint() {
        c.globalAlpha = dim(table);
        c.strokeStyle = c.fillStyle = colour; c.lineWidth = chosen ? 2.2 : strong ? 1.6 : 1;
        c.beginPath(); c.moveTo(x, y); c.bezierCurveTo(x, mid + 6, to, mid - 6, to, BLOCK_Y - 5); c.stroke();
        c.beginPath(); c.moveTo(to, BLOCK_Y - 1); c.lineTo(to - 3, BLOCK_Y - 6); c.lineTo(to + 3, BLOCK_Y - 6); c.fill();
      } };
    }

    function drawTable(c, P, view, { table, cells, dots, left }) {
      c.globalAlpha = dim(table);
      drawText(c, table.letter, left, TABLE_Y - 10, { colour: P.ink, weight: 600 });
      for (const x of dots) drawText(c, "…", x, TABLE_Y + CELL / 2, { colour: P.ink3, align: "center" });
      for (const [index, id, x] of cells) {
        const hot = index === table.hot, width = view.place.cell, chosen = pointed?.view === view && pointed.id === id;
        c.fillStyle = hot ? P.signal : P.bg; c.fillRect(x, TABLE_Y, width, CELL);
        c.strokeStyle = hot ? P.signal : chosen ? P.ink : P.ink3; c.lineWidth = 1; c.strokeRect(x + 0.5, TABLE_Y + 0.5, width - 1, CELL - 1);
        drawText(c, String(id), x + width / 2, TABLE_Y + CELL / 2 + 0.5, { colour: hot ? on(P.signal) : P.ink, size: 10, weight: chosen ? 650 : 400, align: "center" });
      }
    }

    /** A block of several requests in stripes of their hues; of one, plain. */
    function stripes(c, colours, x, y, width, height) {
      if (colours.length < 2) { c.fillStyle = colours[0] ?? "#000000"; c.fillRect(x, y, width, height); return; }
      c.save(); c.beginPath(); c.rect(x, y, width, height); c.clip();
      for (let k = -height, i = 0; k < width; k += 8, i++) {
        c.fillStyle = colours[i % colours.length]; c.beginPath();
        c.moveTo(x + k, y + height); c.lineTo(x + k + 8, y + height); c.lineTo(x + k + 8 + height, y); c.lineTo(x + k + height, y); c.fill();
      }
      c.restore();
    }

    function drawBlock(c, P, view, block, x) {
      const width = view.place.wide, copying = block.label === "copying", owned = block.hues.length > 0;
      const tables = view.panel.tables.filter((table) => table.entries.some(([, id]) => id === block.id));
      c.globalAlpha = Math.max(...(tables.length ? tables : view.panel.tables).map(dim));
      const colours = block.hues.map((hue) => (copying ? mix(hueOf(P, hue), P.bg, 0.35) : hueOf(P, hue)));
      const level = owned ? (BLOCK * block.fill) / view.panel.block_size : 0, top = BLOCK_Y + BLOCK - level;
      c.fillStyle = owned ? mix(colours[0], P.bg, 0.8) : P.free; c.fillRect(x, BLOCK_Y, width, BLOCK);
      stripes(c, colours, x, top, width, level);
      if (block.fill && owned) {
        const inside = level >= 14, middle = inside ? top + level / 2 : top - 8;
        if (colours.length > 1) { c.fillStyle = P.bg; c.fillRect(x + width / 2 - 10, middle - 7, 20, 14); }
        drawText(c, String(block.fill), x + width / 2, middle + 0.5, { colour: inside && colours.length === 1 ? on(colours[0]) : P.ink, weight: 600, align: "center" });
      }
      if (!owned) { c.fillStyle = P.ink3; c.beginPath(); c.arc(x + width / 2, BLOCK_Y + BLOCK / 2, 1.3, 0, 7); c.fill(); }
      if (block.ring) {
        c.globalAlpha = flash;
        c.strokeStyle = P.bg; c.lineWidth = 5; c.strokeRect(x + 1, BLOCK_Y + 1, width - 2, BLOCK - 2);
        c.strokeStyle = P.signal; c.lineWidth = 2; c.setLineDash(block.ring === "source" ? [4, 3] : []); c.strokeRect(x, BLOCK_Y, width, BLOCK); c.setLineDash([]);
        c.globalAlpha = 1;
      }
      if (pointed?.view === view && pointed.id === block.id) { c.strokeStyle = P.ink; c.lineWidth = 1.5; c.strokeRect(x - 2.5, BLOCK_Y - 2.5, width + 5, BLOCK + 5); }
      drawText(c, String(block.id), x + width / 2, BLOCK_Y + BLOCK + 13, { colour: P.ink, weight: 600, align: "center" });
      drawText(c, block.label, x + width / 2, BLOCK_Y + BLOCK + 27, { colour: copying ? P.signal : P.ink2, align: "center" });
      c.globalAlpha = 1;
    }

    /** What is left out before a block. */
    function drawGap(c, P, view, block, x) {
      const middle = block.id === view.place.blocks.keys().next().value ? x / 2 : x - view.place.space / 2;
      drawText(c, "…", middle, BLOCK_Y + BLOCK / 2, { colour: P.ink3, align: "center" });
      drawText(c, `+${view.place.gaps.get(block.id)}`, middle, BLOCK_Y + BLOCK + 13, { colour: P.ink3, align: "center" });
    }

    function arrow(c, P, view) {
      const [source, target] = view.panel.blocks.slice(-2).map((block) => view.place.blocks.get(block.id)), y = BLOCK_Y + BLOCK / 2 + 6;
      c.globalAlpha = flash;
      c.strokeStyle = c.fillStyle = P.signal; c.lineWidth = 2;
      c.beginPath(); c.moveTo(source + view.place.wide, y); c.lineTo(target - 5, y); c.stroke();
      c.beginPath(); c.moveTo(target, y); c.lineTo(target - 8, y - 4); c.lineTo(target - 8, y + 4); c.fill();
      c.globalAlpha = 1;
    }

    function paint() {
      const P = ui.palette;
      for (const view of views) {
        const c = context(view.canvas, view.width + 2 * EDGE, HEIGHT);
        c.translate(EDGE, 0);
        const curves = view.place.tables.flatMap((one, row) => one.cells.map((entry) => curve(c, P, view, row, entry)));
        curves.sort((a, b) => a.strong - b.strong).forEach((one) => one.paint());
        view.place.tables.forEach((one) => drawTable(c, P, view, one));
        for (const block of view.panel.blocks) {
          const x = view.place.blocks.get(block.id);
          if (x === undefined) continue;
          drawBlock(c, P, view, block, x);
          if (view.place.gaps.get(block.id) > 0) drawGap(c, P, view, block, x);
        }
        if (view.panel.blocks[view.panel.blocks.length - 1].label === "copying") arrow(c, P, view);
      }
    }

    /** The tip at a block: who points at it. */
    function point(view, id) {
      pointed = id === null ? null : { view, id };
      tip.style.display = id === null ? "none" : "block";
      if (id !== null) {
        const block = view.byId.get(id), rest = block.references - block.owners.length;
        const owners = block.owners.map(escapeHtml).join(", ") + (rest > 0 ? ` and ${fmt(rest)} more` : "");
        tip.innerHTML = `<b>block ${id}</b>, ${block.label === "copying" ? "taken for the copy" : block.references ? plural(block.references, "reference") : "free"}<br>` +
          (block.references ? `logical block ${block.index} of ${owners}<br>` : "") + `${block.fill} of ${view.panel.block_size} slots hold a token`;
        const left = view.canvas.offsetLeft + view.place.blocks.get(id);
        tip.style.left = `${Math.max(0, Math.min(left, el.clientWidth - 240))}px`;
        tip.style.top = `${view.canvas.offsetTop + BLOCK_Y + BLOCK + 36}px`;
      }
      paint();
    }
    const blockAt = (view, event) => {
      const box = view.canvas.getBoundingClientRect(), x = event.clientX - box.left - EDGE, y = event.clientY - box.top;
      if (y >= BLOCK_Y - 3) return [...view.place.blocks].find(([, left]) => x >= left && x < left + view.place.wide)?.[0] ?? null;
      if (y < TABLE_Y || y > TABLE_Y + CELL) return null;
      return view.place.tables.flatMap((one) => one.cells).find(([, , left]) => x >= left && x < left + view.place.cell)?.[1] ?? null;
    };
    const tableAt = (view, event) => {
      const box = view.canvas.getBoundingClientRect(), x = event.clientX - box.left - EDGE, y = event.clientY - box.top;
      return y > TABLE_Y + CELL ? null : view.place.tables.find((one) => x >= one.left && x < one.left + one.width)?.table ?? null;
    };
    function listen(view) {
      view.canvas.onmousemove = (event) => { const id = blockAt(view, event); if (pointed?.view !== view || pointed.id !== id) point(view, id); };
      view.canvas.onmouseleave = view.canvas.onblur = () => { if (pointed) point(view, null); };
      view.canvas.onclick = (event) => { const table = tableAt(view, event); if (table) ui.pin(table.request === ui.pinned ? null : table.request); };
      view.canvas.onkeydown = (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (move === undefined) return;
        const ids = [...view.place.blocks.keys()], at = pointed?.view === view ? ids.indexOf(pointed.id) : move > 0 ? -1 : ids.length;
        point(view, ids[Math.max(0, Math.min(ids.length - 1, at + move))]);
        event.preventDefault(); event.stopPropagation();
      };
    }

    /** One column a panel: heading, canvas. Made anew when the number of panels changes. */
    function build() {
      if (views.length !== picture.panels.length) {
        panels.replaceChildren(...picture.panels.map(() => h("div", {}, h("p", { class: "title" }), h("p", { class: "note" }), h("div", { class: "wide" }, h("canvas", { tabindex: "0", role: "img" })))));
        views = [...panels.children].map((box) => ({ box, canvas: box.querySelector("canvas") }));
        views.forEach(listen);
      }
      const columns = ui.width >= 900 ? views.length : 1, whole = views.length === 1;
      panels.style.gridTemplateColumns = `repeat(${columns || 1}, minmax(0, 1fr))`;
      views.forEach((view, i) => {
        const panel = picture.panels[i], room = (ui.width - GAP * (columns - 1)) / columns - EDGE;
        view.panel = panel;
        view.width = whole ? Math.max(room, 700) : Math.max(260, Math.min(560, room));
        view.byId = new Map(panel.blocks.map((block) => [block.id, block]));
        view.place = layout(panel, view.width);
        view.box.querySelector(".title").textContent = whole ? panel.title : `${i + 1}  ${panel.title}`;
        view.box.querySelector(".note").textContent = panel.note;
        view.box.classList.toggle("numbered", !whole);
        view.canvas.setAttribute("aria-label", `${panel.title} ${panel.note}`);
      });
      panels.setAttribute("aria-label", captionText(picture.caption));
    }

    function drawTokens() {
      const P = ui.palette, chip = (text, colour) => `<span class="token mono" style="border-color:${colour}">${escapeHtml(text)}</span>`;
      const held = picture.tokens.map((text) => chip(text, P.ink3)).join("");
      const next = picture.next.map((one) => `<b>${escapeHtml(one.letter)}</b> ${chip(one.text, one.writes ? P.signal : hueOf(P, one.hue))}`).join(" ");
      tokens.innerHTML = picture.tokens.length ? `<p><span class="label">block ${picture.source} holds</span><span>${picture.tokens_before ? "… " : ""}${held}</span></p>` +
        `<p><span class="label">into slot ${picture.slot} goes</span><span>${next}</span></p>` : "";
    }

    /** Where the blocks of sequences are that were swapped out. */
    function drawSwapped() {
      const line = ([letter, hue, request, words]) => `<p style="opacity:${letter ? dim({ request }) : 1}"><b style="color:${letter ? hueOf(ui.palette, hue) : ui.palette.ink2}">${escapeHtml(letter)}</b> ${escapeHtml(words)}</p>`;
      swapped.innerHTML = picture.swapped.map(line).join("");
    }

    /** The one animation: rings of a copy come up in 320 ms, unless frames follow each other fast. */
    function fade(started, drawn) {
      requestAnimationFrame((now) => {
        if (picture !== drawn || !el.isConnected) { flash = 1; return; }
        flash = Math.min(1, 0.25 + (0.75 * Math.max(0, now - started)) / 320);
        paint();
        if (flash < 1) fade(started, drawn);
      });
    }

    return {
      draw(next) {
        const key = next.kind === "copy" ? `${next.step} ${next.target}` : null, now = performance.now();
        const appeared = key !== null && key !== flashed && now - drawnAt > 50;
        picture = next; flashed = key; drawnAt = now; flash = 1;
        pointed = null; tip.style.display = "none";
        build(); drawTokens(); drawSwapped(); paint();
        if (appeared && !ui.reducedMotion) { flash = 0.25; paint(); fade(now, next); }
      },
    };
  }
  figures.block_tables = { mount };
}
