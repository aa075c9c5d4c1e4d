// SpeculationView: the last rounds in chips, acceptance by place, and tokens a sequence step by step.
{
  const TALL = 64, LEFT = 28;
  const LEGEND = [["accepted", "accepted draft"], ["refused", "refused"], ["behind", "behind it, not judged"], ["drawn", "drawn by the model itself"]];
  const percent = (part, whole) => {
    const share = (100 * part) / whole;
    return share > 0 && share < 0.5 ? "<1%" : share >= 99.5 && share < 100 ? ">99%" : `${Math.round(share)}%`;
  };

  /** [text, form] of each chip; the token drawn stands behind the drafts. */
  function chipsOf(drafts, accepted, drawn) {
    const found = drafts.map((s, i) => [s, i < accepted ? "accepted" : i === accepted && drawn !== null ? "refused" : "behind"]);
    return drawn === null ? found : [...found, [drawn, "drawn"]];
  }
  const told = (drafts, accepted, drawn) =>
    (drafts.length ? `${accepted} of ${drafts.length} accepted` : "no draft found") + (drawn === null ? ", end" : "");

  figures.speculation_view = {
    mount(el, ui) {
      const rounds = h("div", { class: "rounds" }), rates = h("div", { class: "rates" });
      const title = h("p", { class: "title" }), canvas = h("canvas", { role: "img" });
      el.append(h("div", { class: "panels" }, rounds, rates), h("div", { class: "steps" }, title, canvas));

      const chip = (P, [s, form], hue) => {
        const own = hueOf(P, hue), style = form === "accepted" ? ` style="background:${own};color:${on(own)}"` : "";
        return `<span class="chip ${form}"${style} title="${escapeHtml(LEGEND.find(([name]) => name === form)[1])}">${escapeHtml(s)}</span>`;
      };
      function drawRounds(P, picture) {
        const more = picture.num_hidden ? `, ${fmt(picture.num_hidden)} more sequences are not shown` : "";
        const sequences = picture.sequences.map(([letter, request, hue, list]) => {
          const lines = list.map(([position, step, drafts, accepted, drawn]) =>
            `<div class="round"><button type="button" class="step" data-position="${position}" title="Go to this step">step ${fmt(step)}</button>` +
            chipsOf(drafts, accepted, drawn).map((one) => chip(P, one, hue)).join("") +
            `<span class="told">${told(drafts, accepted, drawn)}</span></div>`).join("");
          const faded = ui.pinned !== null && ui.pinned !== request ? " faded" : "";
          return `<div class="sequence${faded}" style="border-color:${hueOf(P, hue)}" data-request="${escapeHtml(request)}">` +
            `<span class="letter">${escapeHtml(letter)}</span><div>${lines}</div></div>`;
        }).join("");
        const key = LEGEND.map(([form, words]) => `<span>${chip(P, ["token", form], null)} ${words}</span>`).join("");
        setHtml(rounds, `<p class="title">The last rounds<small>of each sequence, the newest below${more}</small></p>${sequences}<div class="key">${key}</div>`);
      }
      function drawRates(picture) {
        const places = picture.places.map(([judged, accepted], i) =>
          `<div class="place"><span>draft ${i + 1}</span><div class="track"><div class="share" style="width:${(100 * accepted) / judged}%"></div></div>` +
          `<b>${percent(accepted, judged)}</b><span>${fmt(accepted)} of ${fmt(judged)}</span></div>`).join("");
        const row = (label, n, measured, predicted, sum = "") =>
          `<tr${sum}><td>${label}</td><td>${fmt(n)}</td><td>${measured.toFixed(2)}</td><td>${predicted.toFixed(2)}</td></tr>`;
        const lengths = picture.lengths.map(([drafts, n, tokens, predicted]) => row(`K = ${drafts}`, n, tokens / n, predicted));
        if (lengths.length > 1) lengths.push(row("all", picture.num_rounds, picture.measured, picture.predicted, ' class="sum"'));
        const head = "<tr><th>Tokens a round</th><th>rounds</th><th>measured</th><th>1 + α₁ + α₁α₂ + …</th></tr>";
        setHtml(rates, `<p class="title">Accepted, by place<small>of those that were judged</small></p>${places}<table>${head}${lengths.join("")}</table>`);
      }
      function drawSteps(P, { steps }) {
        const width = ui.width, c = context(canvas, width, TALL + 30), bottom = TALL + 8;
        const note = steps.length ? `the last ${plural(steps.length, "step")}; a line at 1 + K, the most that K drafts can bring` : "no step yet";
        setHtml(title, `Tokens a sequence, step by step<small>${note}</small>`);
        const highest = Math.max(2, ...steps.map(([drafts, rows, tokens]) => Math.max(drafts + 1, rows ? tokens / rows : 0)));
        const pitch = Math.min(16, (width - LEFT) / Math.max(1, steps.length)), at = (level) => bottom - (TALL * level) / highest;
        for (let level = 1; level <= highest; level++) {
          c.fillStyle = P.rule; c.fillRect(LEFT, Math.round(at(level)), width - LEFT, 1);
          if (level === 1 || level === Math.floor(highest)) drawText(c, String(level), LEFT - 6, at(level), { colour: P.ink3, size: 10, align: "right" });
        }
        steps.forEach(([drafts, rows, tokens], i) => {
          const x = LEFT + i * pitch;
          if (rows) { c.fillStyle = P.tint; c.fillRect(x, at(tokens / rows), Math.max(1, pitch - 1), bottom - at(tokens / rows)); }
          c.fillStyle = P.ink; c.fillRect(x, at(1 + drafts) - 0.75, pitch, 1.5);
        });
        const last = steps[steps.length - 1];
        const now = last ? `K = ${last[0]}${last[1] ? `, ${(last[2] / last[1]).toFixed(2)} tokens a sequence` : ""} in this step` : "";
        drawText(c, now, LEFT, bottom + 14, { colour: P.ink2, size: 10 });
        canvas.setAttribute("aria-label", `Tokens a sequence, step by step. ${now}`);
      }

      rounds.addEventListener("click", (event) => {
        const step = event.target.closest("button.step"), sequence = event.target.closest(".sequence");
        if (step) ui.seek(Number(step.dataset.position));
        else if (sequence) ui.pin(sequence.dataset.request === ui.pinned ? null : sequence.dataset.request);
      });
      return { draw(picture) { drawRounds(ui.palette, picture); drawRates(picture); drawSteps(ui.palette, picture); } };
    },
  };
}
