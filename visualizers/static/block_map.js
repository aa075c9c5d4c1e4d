// One cell a block. Up to 200 blocks large cells with letters, up to 2,000 small ones, up to 20,000 tiny ones without, above
// that one pixel a block, doubled. Only cells that changed are painted anew; copies and the cell that is pointed at lie on a
// second canvas above.
{
  const REST = 300; // milliseconds without a frame
  const [FREE, CACHED, OWNED, SHARED, NULL] = [0, 1, 2, 3, 4];

  /** Cell size, pitch, columns and left margin for so many cells in so much width. */
  function layout(cells, width) {
    const map = Math.min(width, width >= 900 ? 552 : width), top = 5;
    if (cells <= 200) return { cell: 28, pitch: 31, left: 24, top, columns: Math.max(1, Math.floor((map - 24) / 31)), letters: true };
    if (cells <= 2000) return { cell: 14, pitch: 16, left: 36, top, columns: Math.max(1, Math.floor((map - 36) / 16)), letters: true };
    if (cells <= 20000) return { cell: 5, pitch: 6, left: 44, top, columns: Math.max(1, Math.floor((map - 44) / 6)), letters: false };
    return { cell: 2, pitch: 2, left: 0, top: 4, columns: Math.max(1, Math.floor(map / 2)), letters: false, pixels: true };
  }

  function swatch(P, kind, colour = P.solid) {
    const shapes = {
      free: `<rect width="14" height="14" fill="${P.free}"/><circle cx="7" cy="7" r="1.3" fill="${P.ink3}"/>`,
      cached: `<rect width="14" height="14" fill="${P.cached}"/>`,
      owned: `<rect width="14" height="14" fill="${colour}"/>`,
      null: `<rect x=".5" y=".5" width="13" height="13" fill="none" stroke="${P.ink3}"/><path d="M3 11L11 3" stroke="${P.ink3}"/>`,
      shared: `<rect width="14" height="14" fill="${colour}"/><path d="M0 7L7 0h5L0 12zM7 14L14 7v5l-2 2z" fill="${mix(colour, P.bg, 0.45)}"/>`,
    };
    return `<svg class="swatch" viewBox="0 0 14 14" width="14" height="14">${shapes[kind]}</svg>`;
  }

  /** A colour as a word of an image. */
  const word = kept((hex) => { const [r, g, b] = rgb(hex); return (255 << 24) | (b << 16) | (g << 8) | r; });

  const STATES = [["owned", "one owner"], ["shared", "shared, each counted once"], ["cached", "cached, may be evicted"], ["free", "free"], ["null", "null block 0"]];

  /** A table of numbers: each row has a name and one number for each of the columns, which are [head, width in pixels].
   *
   * Numbers change with each step, and laying out a hundred cells takes longer than all else. So they are drawn above the
   * cells, where the browser has laid these out. The cells hold them too, unseen, for who listens, copies or searches: as
   * soon as the picture stands still. A row belongs to its key: when one goes, the others move up as they are. */
  function mountTable(name, columns) {
    const heads = [name, ...columns.map(([head]) => head)], ends = columns.map((_, k) => columns.slice(0, k + 1).reduce((sum, [, w]) => sum + w, 0)), width = ends[ends.length - 1];
    const thead = h("thead", {}, h("tr", {}, ...heads.map((s) => h("th", {}, s)))), body = h("tbody"), last = h("tbody"), canvas = h("canvas", { "aria-hidden": "true" });
    const el = h("div", { class: "numbers" }, h("table", {}, h("colgroup", {}, h("col"), ...columns.map(([, w]) => h("col", { style: `width:${w}px` }))), thead, body, last), canvas);
    let lines = [], numbers = [], drawn = [], look = null, ink = "", pitch = 0, resting = 0;
    function arrange(keys) {
      const wanted = new Set(keys), drop = (i) => lines.splice(i, 1)[0].row.remove();
      keys.forEach((key, i) => {
        while (lines[i] && !wanted.has(lines[i].key)) drop(i);
        if (lines[i]?.key === key) return;
        const cells = heads.map(() => h("td")), row = h("tr", {}, ...cells);
        body.insertBefore(row, lines[i]?.row ?? null); lines.splice(i, 0, { key, row, cells });
      });
      while (lines.length > keys.length) drop(keys.length);
    }
    const write = () => numbers.forEach((texts, i) => texts.forEach((text, k) => setHtml(lines[i].cells[k + 1], text)));
    /** Those that are not there yet. */
    function draw() {
      const before = look;
      look = [numbers.length, pitch, ink, window.devicePixelRatio].join(" ");
      if (look !== before) drawn = [];
      const c = look === before ? canvas.getContext("2d") : context(canvas, width, pitch * numbers.length);
      c.font = `400 12px ${FONT}`; c.fillStyle = ink; c.textAlign = "right"; c.textBaseline = "middle"; c.fontVariantNumeric = "tabular-nums";
      numbers.forEach((texts, i) => texts.forEach((text, k) => {
        if (drawn[i]?.[k] === text) return;
        c.clearRect(ends[k] - columns[k][1], i * pitch, columns[k][1], pitch);
        c.fillText(text, ends[k], (i + 0.5) * pitch + 0.5);
      }));
      drawn = numbers;
    }
    new ResizeObserver(() => {
      if (!lines.length) return;
      canvas.style.top = `${thead.offsetHeight}px`;
      pitch = body.offsetHeight / lines.length;
      draw();
    }).observe(el);
    return {
      el, last,
      /** Each row is its key, the HTML of its name, and the texts of its numbers. */
      set(rows, P) {
        const resized = rows.length !== lines.length;
        arrange(rows.map(([key]) => key));
        rows.forEach(([, name], i) => setHtml(lines[i].cells[0], name));
        numbers = rows.map(([, , ...texts]) => texts); ink = P.ink;
        if (!resized && pitch) draw();
        clearTimeout(resting); resting = setTimeout(write, REST);
      },
    };
  }

  /** The tables beside the map: who owns how much, and the blocks by state. */
  function mountLegend() {
    const owners = mountTable("sequence", [["blocks", 50], ["shared", 50], ["tokens", 60], ["empty", 50]]), states = mountTable("state", [["blocks", 72]]);
    const sum = h("td"), rest = h("p", { class: "rest" }), el = h("div", { class: "legend" }, owners.el, rest, states.el), name = (P, [letter, number, request]) =>
      swatch(P, "owned", hueOf(P, number)) + escapeHtml(letter) + (request === letter ? "" : ` <span class="id" title="${escapeHtml(request)}">${escapeHtml(request)}</span>`);
    states.last.append(h("tr", { class: "sum" }, h("td", {}, "sum, equal to the pool"), sum));
    function draw(picture, P) {
      const n = { ...picture.counts, null: 1 };
      owners.set(picture.rows.map((row) => [row[0], name(P, row), fmt(row[3]), row[4] ? fmt(row[4]) : "·", fmt(row[5]), fmt(row[6])]), P);
      setHtml(rest, picture.more_rows ? `and ${plural(picture.more_rows, "sequence")} more` : "");
      states.set(STATES.map(([kind, label]) => [kind, swatch(P, kind) + label, fmt(n[kind])]), P);
      setHtml(sum, fmt(Object.values(n).reduce((a, b) => a + b)));
    }
    return { el, draw };
  }

  function mount(el, ui) {
    const canvas = h("canvas", { tabindex: "0", role: "img", "data-refimpl": "block-map" });
    const over = h("canvas", { class: "over", "aria-hidden": "true" }), legend = mountLegend(), card = h("div", { class: "card" }), host = h("div", { class: "host" });
    el.append(h("div", { class: "map" }, canvas, over, host), legend.el, card);
    let picture = null, grid = null, hover = null, selected = null, cards = new Map(), flash = 1, flashed = null, image = null, look = null, marked = false, shared = {};

    const decode = (id) => {
      const owner = picture.packed[2 * id], word = picture.packed[2 * id + 1];
      return { owner: owner - 1, owners: word & 255, fill: ((word >> 8) & 255) / 255, kind: (word >> 16) & 255 };
    };
    const sequenceOf = (id) => picture.sequences[id];
    const place = (id) => [grid.left + (id % grid.columns) * grid.pitch, grid.top + Math.floor(id / grid.columns) * grid.pitch];
    const faded = (owners) => ui.pinned !== null && owners.length > 0 && !owners.some((o) => sequenceOf(o)?.[2] === ui.pinned);

    function drawCell(c, P, id) {
      const cell = decode(id), [x, y] = place(id), size = grid.cell;
      if (cell.kind === NULL) {
        c.strokeStyle = P.ink3; c.lineWidth = 1; c.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
        c.beginPath(); c.moveTo(x + size / 7, y + (size * 6) / 7); c.lineTo(x + (size * 6) / 7, y + size / 7); c.stroke();
        return;
      }
      if (cell.kind === FREE || cell.kind === CACHED) {
        c.fillStyle = cell.kind === CACHED ? P.cached : P.free; c.fillRect(x, y, size, size);
        if (cell.kind === FREE && size > 9) { c.fillStyle = P.ink3; c.beginPath(); c.arc(x + size / 2, y + size / 2, 1.3, 0, 7); c.fill(); }
        return;
      }
      const owners = cell.kind === SHARED ? picture.shared[id] ?? [cell.owner] : [cell.owner];
      const hues = [...new Set(owners.map((o) => hueOf(P, sequenceOf(o)?.[1])))], colour = hues[0];
      c.globalAlpha = faded(owners) ? 0.28 : 1;
      c.fillStyle = mix(colour, P.bg, 0.78); c.fillRect(x, y, size, size);
      const top = y + size * (1 - cell.fill);
      c.fillStyle = colour; c.fillRect(x, top, size, size * cell.fill);
      if (cell.kind === SHARED) stripes(c, P, hues, x, top, size, size * cell.fill);
      if (grid.letters) label(c, P, cell, colour, sequenceOf(cell.owner)?.[0] ?? "?", x, y, size);
      c.globalAlpha = 1;
    }

    function stripes(c, P, hues, x, y, width, height) {
      const list = hues.length > 1 ? hues : [hues[0], mix(hues[0], P.bg, 0.42)], step = Math.max(2, width / 5.6);
      c.save(); c.beginPath(); c.rect(x, y, width, height); c.clip();
      for (let k = -width, i = 0; k < width; k += step, i++) {
        c.fillStyle = list[i % list.length]; c.beginPath();
        c.moveTo(x + k, y + height); c.lineTo(x + k + step, y + height); c.lineTo(x + k + step + width, y + height - width); c.lineTo(x + k + width, y + height - width); c.fill();
      }
      c.restore();
    }

    function label(c, P, cell, colour, letter, x, y, size) {
      const small = size < 20;
      if (cell.kind === SHARED) {
        const text = "×" + (cell.owners === 255 ? "255+" : cell.owners);
        if (small) { drawText(c, String(Math.min(9, cell.owners)), x + size / 2, y + size / 2 + 0.5, { colour: on(colour), size: 9, weight: 650, align: "center" }); return; }
        c.font = `650 11px ${FONT}`;
        const width = c.measureText(text).width + 4;
        c.fillStyle = P.bg; c.fillRect(x + size / 2 - width / 2, y + size / 2 - 7, width, 14);
        drawText(c, text, x + size / 2, y + size / 2 + 0.5, { colour: P.ink, weight: 650, align: "center" });
        return;
      }
      const high = cell.fill >= 0.5, middle = small ? y + size / 2 : high ? y + size * (1 - cell.fill / 2) : y + (size * (1 - cell.fill)) / 2;
      if (small && letter.length > 2) return;
      drawText(c, letter, x + size / 2, middle + 0.5, { colour: high ? on(colour) : P.ink, size: small ? 8 : letter.length > 1 ? 10 : 11, weight: 600, align: "center" });
    }

    /** 20,000 blocks and more: one word of a 32-bit image a block, which the page shows at twice its size. */
    function drawPixels(P, rows, ids) {
      const count = picture.num_blocks + 1, margin = grid.top / grid.pitch, start = margin * grid.columns;
      if (!image || image.width !== grid.columns || image.height !== rows + 2 * margin) {
        image = new ImageData(grid.columns, rows + 2 * margin);
        canvas.width = image.width; canvas.height = image.height;
        canvas.style.width = `${2 * image.width}px`; canvas.style.height = `${2 * image.height}px`;
        ids = null;
      }
      const words = new Uint32Array(image.data.buffer), packed = picture.packed, byOwner = new Map();
      const colours = [word(P.free), word(P.cached), 0, 0, word(P.ink3)];
      function owned(owner) {
        let found = byOwner.get(owner);
        if (found === undefined) {
          const sequence = sequenceOf(owner - 1), colour = sequence && hueOf(P, sequence[1]);
          found = !sequence ? colours[NULL] : word(ui.pinned !== null && sequence[2] !== ui.pinned ? mix(colour, P.bg, 0.72) : colour);
          byOwner.set(owner, found);
        }
        return found;
      }
      let last = null, colour = 0; // neighbours are often one sequence's
      function paintOne(id) {
        const kind = (packed[2 * id + 1] >> 16) & 255, owner = packed[2 * id];
        if (kind !== OWNED && kind !== SHARED) words[start + id] = colours[kind];
        else words[start + id] = owner === last ? colour : (colour = owned((last = owner)));
      }
      if (ids === null) for (let id = 0; id < count; id++) paintOne(id);
      else for (const id of ids) paintOne(id);
      canvas.getContext("2d").putImageData(image, 0, 0);
    }

    /** The cells `ids`, or all of them where it is null. */
    function drawCells(P, rows, ids) {
      const width = grid.left + grid.columns * grid.pitch, count = picture.num_blocks + 1;
      if (ids === null) {
        const c = context(canvas, width, 8 + rows * grid.pitch);
        image = null;
        for (let row = 0; row < rows; row++) if (grid.pitch > 10 || row % 5 === 0) drawText(c, String(row * grid.columns), grid.left - 7, grid.top + row * grid.pitch + grid.cell / 2, { colour: P.ink3, size: 10, align: "right" });
        for (let id = 0; id < count; id++) drawCell(c, P, id);
        return;
      }
      const c = canvas.getContext("2d"), margin = Math.min(1, (grid.pitch - grid.cell) / 2);
      for (const id of ids) { const [x, y] = place(id); c.clearRect(x - margin, y - margin, grid.cell + 2 * margin, grid.cell + 2 * margin); drawCell(c, P, id); }
    }

    /** Cells that changed since they were painted; null stands for all. Owners of a shared block can change while its cell does not. */
    function changedCells() {
      const before = look, ids = picture.changes.ids;
      look = [grid.columns, grid.cell, picture.num_blocks, ui.theme, ui.pinned, window.devicePixelRatio].join(" ");
      picture.changes.ids = [];
      if (look !== before || ids === null) { shared = picture.shared; return null; }
      const found = new Set(ids);
      if (shared !== picture.shared && !grid.pixels) for (const id in picture.shared) if (String(shared[id]) !== String(picture.shared[id])) found.add(Number(id));
      shared = picture.shared;
      return found;
    }

    function drawCopies(c, P) {
      const middle = (id) => { const [x, y] = place(id); return [x + grid.cell / 2, y + grid.cell / 2]; };
      c.globalAlpha = flash;
      for (const [source, target] of picture.copies) {
        const [ax, ay] = middle(source), [bx, by] = middle(target), size = grid.cell + 2;
        c.strokeStyle = P.signal; c.lineWidth = 2; c.strokeRect(bx - size / 2, by - size / 2, size, size);
        c.setLineDash([3, 2]); c.strokeRect(ax - size / 2, ay - size / 2, size, size); c.setLineDash([]);
        const angle = Math.atan2(by - ay, bx - ax), far = Math.hypot(bx - ax, by - ay), bulge = far < 50 ? 0 : 22;
        const mx = (ax + bx) / 2 - Math.sin(angle) * bulge, my = (ay + by) / 2 + Math.cos(angle) * bulge;
        const edge = (x, y) => { const k = (grid.cell / 2 + 3) / Math.max(Math.abs(mx - x), Math.abs(my - y), 1); return [x + (mx - x) * k, y + (my - y) * k]; };
        const [sx, sy] = edge(ax, ay), [ex, ey] = edge(bx, by), tip = Math.atan2(ey - my, ex - mx);
        for (const [colour, width] of [[P.bg, 4.5], [P.signal, 1.6]]) { c.strokeStyle = colour; c.lineWidth = width; c.beginPath(); c.moveTo(sx, sy); c.quadraticCurveTo(mx, my, ex, ey); c.stroke(); }
        c.fillStyle = P.signal; c.beginPath(); c.moveTo(ex, ey);
        c.lineTo(ex - 8 * Math.cos(tip - 0.4), ey - 8 * Math.sin(tip - 0.4)); c.lineTo(ex - 8 * Math.cos(tip + 0.4), ey - 8 * Math.sin(tip + 0.4)); c.fill();
      }
      c.globalAlpha = 1;
    }

    function paint() {
      grid = layout(picture.num_blocks + 1, ui.width);
      const rows = Math.ceil((picture.num_blocks + 1) / grid.columns), ids = changedCells();
      if (ids === null || ids.size) (grid.pixels ? drawPixels : drawCells)(ui.palette, rows, ids);
      canvas.classList.toggle("pixels", Boolean(grid.pixels));
      Object.assign(canvas.dataset, { cell: grid.cell, pitch: grid.pitch, left: grid.left, columns: grid.columns, top: grid.top, drawn: ids === null ? picture.num_blocks + 1 : ids.size });
      paintOver();
    }

    /** What lies above the cells: copies, and the cell that is pointed at or chosen. */
    function paintOver() {
      const P = ui.palette, count = picture.num_blocks + 1, one = hover ?? selected, points = one !== null && one < count;
      if (!points && !picture.copies.length && !marked) return;
      marked = points || picture.copies.length > 0;
      const c = context(over, grid.left + grid.columns * grid.pitch, 2 * grid.top + Math.ceil(count / grid.columns) * grid.pitch);
      drawCopies(c, P);
      if (points) { const [x, y] = place(one); c.strokeStyle = P.ink; c.lineWidth = 1.5; c.strokeRect(x - 2.5, y - 2.5, grid.cell + 5, grid.cell + 5); }
    }

    /** The swap space: a hollow square for each host block in use. */
    function drawHost() {
      const P = ui.palette, strip = picture.host, faint = (request) => (ui.pinned !== null && ui.pinned !== request ? "opacity:.28" : "");
      setHtml(host, strip ? `<p>${escapeHtml(strip.title)}</p>` + strip.cells.map(([id, letter, hue, request, names]) => `<span title="host block ${id}: ${escapeHtml(names)}" style="border-color:${hueOf(P, hue)};${faint(request)}">${letter.length < 3 ? escapeHtml(letter) : ""}</span>`).join("") : "");
    }
    function drawCard() {
      const id = hover ?? selected;
      if (id === null || id > picture.num_blocks) { setHtml(card, `<p class="quiet">Point at a block to see who owns it and what is in it.</p>`); return; }
      const P = ui.palette, cell = decode(id), known = cards.get(id);
      const states = ["free", "cached, may be evicted", "one owner", `shared ${cell.owners} times`, "null block: padded rows point here"];
      const owners = known ? known.owners.map(([letter, number]) => swatch(P, "owned", hueOf(P, number)) + escapeHtml(letter)).join(" ") : "…";
      const tokens = known ? known.tokens.map((t) => `<span class="token">${escapeHtml(t)}</span>`).join("") : "";
      setHtml(card, `<b>block ${id}</b> <span class="quiet">${states[cell.kind]}</span><dl><dt>owners</dt><dd>${cell.owners ? owners : "none"}</dd><dt>references</dt><dd>${cell.owners}</dd>
        <dt>tokens</dt><dd>${Math.round(cell.fill * picture.block_size)} of ${picture.block_size}</dd>${known && known.index >= 0 ? `<dt>in its tables</dt><dd>the logical block ${known.index}</dd>` : ""}
        <dt>findable</dt><dd>${known ? (known.published ? "yes, by later prompts" : "no: only full blocks are") : "…"}</dd></dl><div class="tokens mono">${tokens}</div>`);
    }
    function point(id) {
      if (id !== null && !cards.has(id)) ui.send({ type: "card", block: id });
      paintOver(); drawCard();
    }
    ui.onCard((one) => { cards.set(one.block, one); if (picture) drawCard(); });
    const at = (event) => {
      const box = canvas.getBoundingClientRect(), column = Math.floor((event.clientX - box.left - grid.left) / grid.pitch), row = Math.floor((event.clientY - box.top - grid.top) / grid.pitch), id = row * grid.columns + column;
      return column >= 0 && column < grid.columns && row >= 0 && id <= picture.num_blocks ? id : null;
    };
    canvas.onmousemove = (event) => { if (!picture) return; const id = at(event); if (id !== hover) { hover = id; point(id); } };
    canvas.onmouseleave = () => { hover = null; if (picture) point(selected); };
    canvas.onclick = (event) => { if (!picture) return; selected = at(event); const owner = selected === null ? null : sequenceOf(decode(selected).owner); ui.pin(owner ? owner[2] : null); point(selected); };
    canvas.onkeydown = (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid?.columns, ArrowDown: grid?.columns }[event.key];
      if (move === undefined || !picture) return;
      selected = Math.max(0, Math.min(picture.num_blocks, (selected ?? 0) + move)); hover = null; point(selected);
      event.preventDefault(); event.stopPropagation();
    };
    return {
      draw(next) {
        const appeared = next.copies.length && JSON.stringify(next.copies) !== flashed;
        picture = next; cards = new Map(); flashed = JSON.stringify(next.copies);
        canvas.setAttribute("aria-label", captionText(next.caption));
        el.classList.toggle("narrow", ui.width < 900);
        flash = 1; paint(); legend.draw(picture, ui.palette); drawHost(); drawCard();
        if ((hover ?? selected) !== null) ui.send({ type: "card", block: hover ?? selected });
        if (appeared && !ui.reducedMotion) fade(performance.now(), next);
      },
    };
    /** The one animation: rings of a copy come up in 320 ms. */
    function fade(started, drawn) {
      requestAnimationFrame((now) => {
        if (picture !== drawn) return;
        flash = Math.min(1, 0.25 + (0.75 * (now - started)) / 320); paintOver();
        if (flash < 1) fade(started, drawn);
      });
    }
  }
  figures.block_map = { mount };
}
