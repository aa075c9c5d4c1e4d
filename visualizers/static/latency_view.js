// LatencyView: two distributions on logarithmic axes. A dot is a request; a bar counts.
{
  const LEFT = 112, RIGHT = 24, TOP = 26, BOTTOM = 160, HEIGHT = 184, MIDDLE = (TOP + 16 + BOTTOM) / 2, GAP = 40;

  /** Three digits: 420 µs, 10.7 ms, 467 ms, 1.08 s. */
  const secondsText = (s) => {
    const [unit, size] = s >= 0.9995 ? ["s", 1] : s >= 0.9995e-3 ? ["ms", 1e-3] : ["µs", 1e-6], v = s / size;
    return `${v.toFixed(v >= 99.95 ? 0 : v >= 9.995 || unit !== "s" ? 1 : 2)} ${unit}`;
  };
  const scale = ([low, high], width) => {
    const start = Math.log10(low), factor = (width - LEFT - RIGHT) / (Math.log10(high) - start);
    return (s) => LEFT + (Math.log10(Math.max(low, s)) - start) * factor;
  };

  /** A lane for each dot, from the middle outwards, so that none covers another; xs are sorted. */
  function swarm(xs, step, lanes) {
    const ends = Array(lanes).fill(-Infinity);
    return xs.map((x) => {
      let i = ends.findIndex((end) => end <= x - step);
      if (i < 0) i = ends.indexOf(Math.min(...ends));
      ends[i] = x;
      return Math.floor((i + 1) / 2) * (i % 2 ? 1 : -1);
    });
  }
  const dotSize = (n) => {
    const radius = n <= 150 ? 4.2 : n <= 600 ? 3 : 2, step = 2 * radius + 0.8;
    return { radius, step, lanes: Math.floor((BOTTOM - TOP - 20) / step) };
  };

  function drawFrame(c, P, title, note, panel, width, counts) {
    const at = scale(panel.axis, width);
    drawText(c, title, 0, 7, { colour: P.ink, size: 12, weight: 550 });
    drawText(c, note, width, 7, { colour: P.ink2, align: "right" });
    for (const [seconds, label] of panel.ticks) {
      c.fillStyle = P.rule;
      c.fillRect(Math.round(at(seconds)), TOP, 1, BOTTOM - TOP);
      drawText(c, label, at(seconds), BOTTOM + 12, { colour: P.ink3, size: 10, align: "center" });
    }
    counts.forEach((s, i) => drawText(c, s, 0, 86 + 16 * i, { colour: i ? P.ink2 : P.ink, weight: i ? 400 : 550 }));
    return at;
  }
  function drawQuantiles(c, P, panel, at, width) {
    if (!panel.count) return;
    for (const [name, align, side] of [["p50", "right", -4], ["p99", "left", 4]]) {
      const x = at(panel[name]);
      c.fillStyle = P.ink;
      c.fillRect(x - 0.75, TOP + 14, 1.5, BOTTOM - TOP - 14);
      const label = `${name} ${secondsText(panel[name])}`;
      c.font = `550 11px ${FONT}`;
      const leaves = align === "left" && x + side + c.measureText(label).width > width;
      drawText(c, label, leaves ? width : x + side, TOP + 8, { colour: P.ink, weight: 550, align: leaves ? "right" : align });
    }
  }
  /** Where bar `index` begins, in seconds. */
  const barStart = (picture, panel, index) => picture.shortest * 10 ** ((panel.first_bar + index) / picture.bars_per_decade);
  function drawBars(c, P, picture, panel, at, hovered) {
    const most = Math.max(1, ...panel.bars);
    panel.bars.forEach((n, i) => {
      if (!n) return;
      const x = at(barStart(picture, panel, i)), end = at(barStart(picture, panel, i + 1));
      const height = Math.max(1.5, ((BOTTOM - TOP - 30) * n) / most);
      c.fillStyle = i === hovered ? P.solid : P.tint;
      c.fillRect(x, BOTTOM - height, Math.max(1, end - x - 1), height);
    });
  }

  figures.latency_view = {
    mount(el, ui) {
      const left = h("canvas", { role: "img", tabindex: "0" }), right = h("canvas", { role: "img", tabindex: "0" });
      const tip = h("div", { class: "tip" });
      el.append(h("div", { class: "latency-view" }, left, right, tip));
      let picture = null, marks = [], ring = null;
      const hover = { mark: null, first: -1, pause: -1, ring: false };
      const panelWidth = () => (ui.width < 900 ? ui.width : (ui.width - GAP) / 2);
      const dim = (request) => (ui.pinned === null || ui.pinned === request ? 1 : 0.28);
      const asBars = () => picture.first.count > picture.first.dots.length;

      function drawLeft() {
        const P = ui.palette, width = panelWidth(), panel = picture.first, c = context(left, width, HEIGHT);
        const waiting = panel.num_waiting ? [`${fmt(panel.num_waiting)} still waiting`] : [];
        const note = asBars() ? "a bar counts requests" : "a dot is a request, a ring one that still waits";
        const at = drawFrame(c, P, "Time to first token", note, panel, width, [plural(panel.count, "request"), ...waiting]);
        marks = [];
        if (asBars()) drawBars(c, P, picture, panel, at, hover.first);
        drawQuantiles(c, P, panel, at, width);
        if (!asBars()) drawDots(c, P, panel, at);
        left.setAttribute("aria-label", captionText(picture.caption));
      }
      function drawDots(c, P, panel, at) {
        const dots = panel.dots.map(([seconds, queued, hue, letter, request, prompt, position], i) =>
          ({ seconds, queued, hue, letter, request, prompt, position, why: panel.reasons[i], solid: true }));
        const rings = panel.waiting.map(([seconds, hue, letter, request]) => ({ seconds, hue, letter, request, solid: false }));
        marks = [...dots, ...rings].sort((a, b) => a.seconds - b.seconds);
        const { radius, step, lanes } = dotSize(marks.length);
        const chosen = swarm(marks.map((m) => at(m.seconds)), step, lanes);
        marks.forEach((m, i) => {
          m.x = at(m.seconds); m.y = MIDDLE + chosen[i] * step;
          c.globalAlpha = dim(m.request);
          c.beginPath();
          c.arc(m.x, m.y, m.solid ? radius : radius - 0.8, 0, 7);
          if (m.solid) { c.fillStyle = hueOf(P, m.hue); c.fill(); }
          else { c.strokeStyle = hueOf(P, m.hue); c.lineWidth = 1.5; c.stroke(); }
        });
        c.globalAlpha = 1;
        const shown = hover.mark && marks.find((m) => m.request === hover.mark.request && m.solid === hover.mark.solid);
        if (shown) {
          c.strokeStyle = P.ink; c.lineWidth = 1.5;
          c.beginPath(); c.arc(shown.x, shown.y, radius + 3, 0, 7); c.stroke();
        }
      }
      function drawRight() {
        const P = ui.palette, width = panelWidth(), panel = picture.pauses, c = context(right, width, HEIGHT);
        const counts = [plural(panel.count, "pause")];
        const at = drawFrame(c, P, "Time between tokens", "pauses of a sequence", panel, width, counts);
        drawBars(c, P, picture, panel, at, hover.pause);
        drawQuantiles(c, P, panel, at, width);
        ring = null;
        if (panel.longest) {
          const [seconds, hue, label, request, position] = panel.longest, x = at(seconds), y = BOTTOM - 40;
          ring = { x, y, label, request, position };
          c.globalAlpha = dim(request);
          c.fillStyle = P.bg; c.strokeStyle = hueOf(P, hue); c.lineWidth = 2;
          c.beginPath(); c.arc(x, y, 4.2, 0, 7); c.fill(); c.stroke();
          c.font = `400 11px ${FONT}`;
          const wide = c.measureText(label).width, onLeft = x + 10 + wide > width;
          c.fillStyle = P.bg; c.globalAlpha = 0.85;
          c.fillRect(onLeft ? x - 13 - wide : x + 7, y - 8, wide + 6, 16);
          c.globalAlpha = dim(request);
          drawText(c, label, onLeft ? x - 10 : x + 10, y, { colour: hover.ring ? P.ink : P.ink2, align: onLeft ? "right" : "left" });
          c.globalAlpha = 1;
        }
        const p = panel.count ? `: p50 ${secondsText(panel.p50)}, p99 ${secondsText(panel.p99)}` : "";
        right.setAttribute("aria-label", `Time between tokens, ${counts[0]}${p}`);
      }

      function showTip(canvas, x, y, lines) {
        tip.innerHTML = lines.map((s, i) => (i ? escapeHtml(s) : `<b>${escapeHtml(s)}</b>`)).join("<br>");
        tip.style.display = "block";
        const room = el.clientWidth - tip.offsetWidth - 4;
        tip.style.left = Math.max(0, Math.min(room, canvas.offsetLeft + x + 12)) + "px";
        tip.style.top = canvas.offsetTop + y + 12 + "px";
      }
      function markLines(m) {
        if (!m.solid) return [`${m.letter} waits, ${secondsText(m.seconds)} so far`];
        const rest = Math.max(0, m.seconds - m.queued);
        const lines = [`${m.letter}, first token after ${secondsText(m.seconds)}`,
          `${secondsText(m.queued)} in the queue, then ${secondsText(rest)}`, plural(m.prompt, "prompt token")];
        return m.why ? [...lines, m.why] : lines;
      }
      function showMark(m) {
        hover.mark = m;
        drawLeft();
        if (m) showTip(left, m.x, m.y, markLines(m)); else tip.style.display = "none";
      }
      function barAt(panel, x) {
        const at = scale(panel.axis, panelWidth());
        return panel.bars.findIndex((n, i) => n && x >= at(barStart(picture, panel, i)) && x < at(barStart(picture, panel, i + 1)));
      }
      function barLines(panel, i, what) {
        const share = ((100 * panel.bars[i]) / panel.count).toFixed(1);
        const [from, to] = [barStart(picture, panel, i), barStart(picture, panel, i + 1)].map(secondsText);
        return [`${from} to ${to}`, `${fmt(panel.bars[i])} of ${plural(panel.count, what)}, ${share} %`];
      }
      const nearest = (x, y) => {
        let best = null, distance = 81;
        for (const m of marks) {
          const d = (m.x - x) ** 2 + (m.y - y) ** 2;
          if (d < distance) [best, distance] = [m, d];
        }
        return best;
      };

      left.addEventListener("mousemove", (event) => {
        if (!picture) return;
        if (!asBars()) { const m = nearest(event.offsetX, event.offsetY); if (m !== hover.mark) showMark(m); return; }
        hover.first = barAt(picture.first, event.offsetX);
        drawLeft();
        if (hover.first < 0) tip.style.display = "none";
        else showTip(left, event.offsetX, event.offsetY, barLines(picture.first, hover.first, "request"));
      });
      right.addEventListener("mousemove", (event) => {
        if (!picture) return;
        hover.ring = ring !== null && Math.hypot(event.offsetX - ring.x, event.offsetY - ring.y) < 9;
        hover.pause = hover.ring ? -1 : barAt(picture.pauses, event.offsetX);
        right.style.cursor = hover.ring ? "pointer" : "";
        drawRight();
        if (hover.ring) showTip(right, ring.x, ring.y, [ring.label, "Click: go to the step that ended it"]);
        else if (hover.pause >= 0) showTip(right, event.offsetX, event.offsetY, barLines(picture.pauses, hover.pause, "pause"));
        else tip.style.display = "none";
      });
      for (const canvas of [left, right]) canvas.addEventListener("mouseleave", () => {
        Object.assign(hover, { mark: null, first: -1, pause: -1, ring: false });
        tip.style.display = "none";
        if (picture) { drawLeft(); drawRight(); }
      });
      const pin = (m) => ui.pin(m && m.request !== ui.pinned ? m.request : null);
      left.addEventListener("click", (event) => { if (picture) pin(nearest(event.offsetX, event.offsetY)); });
      right.addEventListener("click", () => { if (hover.ring && ring) ui.seek(ring.position); });
      left.addEventListener("keydown", (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (by && marks.length) {
          const now = hover.mark ? marks.findIndex((m) => m.request === hover.mark.request && m.solid === hover.mark.solid) : -1;
          showMark(marks[now < 0 ? (by > 0 ? 0 : marks.length - 1) : Math.max(0, Math.min(marks.length - 1, now + by))]);
        } else if (event.key === "Enter" && hover.mark) pin(hover.mark);
        else return;
        event.preventDefault(); event.stopPropagation();
      });
      right.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || !ring) return;
        ui.seek(ring.position);
        event.preventDefault(); event.stopPropagation();
      });
      return { draw(next) { picture = next; drawLeft(); drawRight(); } };
    },
  };
}
