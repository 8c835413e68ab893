(() => {
  const DASHES = [[], [6, 4], [8, 3, 2, 3], [2, 3]];
  const COLOURS = 8, HEIGHT = 330, NEAR = 24;
  const MAGNITUDES = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const drawn = [];

  const make = (tag, options = {}, ...children) => {
    const found = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
      else if (value !== false) found.setAttribute(name, value === true ? "" : value);
    }
    found.append(...children);
    return found;
  };
  const button = (text, pressed, action) => make("button", { type: "button", "aria-pressed": String(pressed), onclick: action }, text);
  const dashes = (number) => DASHES[Math.floor(number / COLOURS) % DASHES.length];
  const striped = (dash, ink) => {
    let end = 0;
    const stripes = dash.map((length, i) => `${i % 2 ? "transparent" : ink} ${end}px ${(end += length)}px`);
    return stripes.length ? `repeating-linear-gradient(90deg, ${stripes})` : ink;
  };
  const shown = (value, digits) => (value === null || value === undefined ? "-" : value.toFixed(digits));

  // Of equal places the last counts: a method that sends nothing stays at 0 bytes.
  const places = (xs) => xs.map((_, i) => i).filter((i) => xs[i] !== null && (i + 1 === xs.length || xs[i] !== xs[i + 1]));

  const nearest = (values, index) => {
    for (let away = 0; away < values.length; away++)
      for (const i of [index - away, index + away]) if (values[i] !== null && values[i] !== undefined) return i;
    return index;
  };

  function plotted(data, axis, visible, box, hooks) {
    const tables = [], series = [{}], bands = [], owners = [];
    data.series.forEach((one, number) => {
      const xs = one.x[axis];
      if (!xs) return;
      const kept = places(xs), columns = [one.y, ...(one.edges || [])];
      tables.push([kept.map((i) => xs[i]), ...columns.map((column) => kept.map((i) => column[i]))]);
      const stroke = () => colour(`series-${number % COLOURS}`);
      const at = series.length;
      owners.push({ number, at, end: at + columns.length, names: new Map(kept.map((i) => [xs[i], i])) });
      series.push({
        label: one.label, show: visible[number], stroke, width: 2, spanGaps: true,
        dash: dashes(number),
        points: { show: data.points || one.y.length <= 40, size: 6, fill: stroke },
      });
      if (one.edges) {
        const edge = { show: visible[number], stroke: "transparent", spanGaps: true, points: { show: false } };
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [at + 2, at + 1], fill: () => `color-mix(in srgb, ${stroke()} 18%, transparent)` });
      }
    });
    const look = { stroke: () => colour("ink"), grid: { stroke: () => colour("grid"), width: 1 }, ticks: { stroke: () => colour("grid"), width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    const [least, most] = data.bounds || [null, null];
    const options = {
      width: box.clientWidth, height: HEIGHT, series, bands, legend: { show: false },
      scales: { x: { time: false }, y: least === null ? {} : { range: [least, most] } },
      axes: [
        { ...look, label: data.axes[axis].label, size: 36, labelSize: 22, ...(data.axes[axis].whole ? { incrs: MAGNITUDES } : {}) },
        { ...look, label: data.label, size: 56, labelSize: 22 },
      ],
      cursor: { drag: { x: true, y: false }, dataIdx: (self, at, index) => (at ? nearest(self.data[at], index) : index) },
      hooks,
    };
    return { plot: new uPlot(options, tables.length ? uPlot.join(tables) : [[]], box), owners };
  }

  function chart(data, title, described, opens) {
    const visible = data.series.map(() => true);
    let axis = Math.max(0, data.axes.findIndex((_, at) => data.series.some((one) => one.x[at])));
    let current = null, down = null;
    const box = make("div", { class: "plot", role: "img", "aria-label": `${title}, interactive chart`, ...(described ? { "aria-describedby": described } : {}) });
    const where = make("span", { class: "where" });
    const values = data.series.map(() => make("span", { class: "value" }));
    const entries = data.series.map((one, number) => {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = striped(dashes(number), `var(--series-${number % COLOURS})`);
      const entry = button("", true, () => {
        visible[number] = !visible[number];
        entry.setAttribute("aria-pressed", String(visible[number]));
        const mine = current?.owners.find((one) => one.number === number);
        for (let at = mine?.at; at < mine?.end; at++) current.plot.setSeries(at, { show: visible[number] });
      });
      entry.append(swatch, one.label, " ", values[number]);
      return entry;
    });
    const legend = make("div", { class: "legend", role: "group", "aria-label": "Curves, each can be hidden" }, ...entries, where);
    const reset = make("button", { type: "button", hidden: true, class: "reset", onclick: () => draw() }, "Reset zoom");
    const choices = data.axes.map((one, at) => button(one.label, at === axis, () => { axis = at; draw(); }));
    const known = choices.filter((_, at) => data.series.some((one) => one.x[at]));
    const against = known.length > 1 ? make("div", { class: "against", role: "group", "aria-label": "Horizontal axis" }, "Against ", ...known) : "";
    const hint = opens ? "Drag to zoom in. Choose a point to see its client." : "Drag to zoom in.";

    const say = (self) => {
      const index = self.cursor.idx;
      const outside = index === null || index === undefined;
      values.forEach((one) => { one.textContent = ""; });
      where.textContent = "";
      if (outside) return;
      for (const { number, at, names } of current.owners) {
        const place = self.cursor.idxs[at], x = self.data[0][place], y = self.data[at][place];
        const name = data.series[number].names?.[names.get(x)];
        values[number].textContent = visible[number] ? `${shown(y, data.digits)}${name ? ` (${name})` : ""}` : "";
      }
      where.textContent = `${data.axes[axis].label}: ${Number(self.data[0][index].toPrecision(6))}`;
    };
    const choose = (event) => {
      if (!opens || (down && Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) > 4)) return;
      const self = current.plot, [left, top] = [event.offsetX, event.offsetY];
      let best = [NEAR, null];
      for (const { number, at, names } of current.owners) {
        if (!visible[number]) continue;
        self.data[0].forEach((x, i) => {
          const y = self.data[at][i];
          if (y === null || y === undefined) return;
          const away = Math.hypot(self.valToPos(x, "x") - left, self.valToPos(y, "y") - top);
          if (away < best[0]) best = [away, data.series[number].clients[names.get(x)]];
        });
      }
      if (best[1] !== null && best[1] !== undefined) opens(best[1]);
    };
    function draw() {
      current?.plot.destroy();
      reset.hidden = true;
      choices.forEach((one, at) => one.setAttribute("aria-pressed", String(at === axis)));
      current = plotted(data, axis, visible, box, {
        setCursor: [say],
        setSelect: [(self) => { reset.hidden = self.select.width === 0; }],
      });
      current.plot.over.addEventListener("mousedown", (event) => { down = event; });
      current.plot.over.addEventListener("click", choose);
      current.plot.over.addEventListener("dblclick", () => { reset.hidden = true; });
    }
    const whole = make("div", { class: "chart" }, against, legend, box, make("p", { class: "hint" }, `${hint} `, reset));
    drawn.push(() => current?.plot.redraw());
    new ResizeObserver(() => {
      if (!box.clientWidth) return;
      if (current === null) draw();
      else if (current.plot.width !== box.clientWidth) current.plot.setSize({ width: box.clientWidth, height: HEIGHT });
    }).observe(box);
    return whole;
  }

  function clientPanel(details) {
    const row = (client) => [...document.querySelectorAll("#clients-table tbody tr")].find((one) => one.cells[0].dataset.key === String(client));
    const panel = make("div", { class: "client", role: "region", "aria-label": "The chosen client" });
    // Said once for each choice: the values under the cursor, which change all the time, are not.
    const said = make("span", { class: "unseen", role: "status" });
    const names = Object.keys(details.clients).map((client) => [client, row(client)?.cells[0].textContent ?? client]);
    const list = make("select", { onchange: () => open(list.value) }, make("option", { value: "" }, "none"), ...names.map(([client, name]) => make("option", { value: client }, name)));
    function open(client) {
      const found = details.clients[client], listed = row(client);
      list.value = found ? String(client) : "";
      panel.replaceChildren();
      if (!found) return;
      const headings = [...document.querySelectorAll("#clients-table thead th")].map((one) => one.textContent);
      const facts = listed ? [...listed.cells].map((cell, at) => make("div", {}, make("dt", {}, headings[at]), make("dd", {}, cell.textContent))) : [];
      const series = details.lines.map((label, at) => ({ label, x: [details.rounds], y: found.curves[at], edges: null }));
      const curve = { ...details, series: series.filter((one) => one.y.some((y) => y !== null)), points: false };
      const most = Math.max(1, ...found.labels.map(([, count]) => count));
      const bars = found.labels.map(([label, count]) => {
        const bar = make("span", { class: "bar" });
        bar.style.width = `${(100 * count) / most}%`;
        return make("tr", {}, make("th", { scope: "row" }, label), make("td", {}, String(count)), make("td", { class: "room", "aria-hidden": "true" }, bar));
      });
      const name = `Client ${listed?.cells[0].textContent ?? client}`;
      said.textContent = `${name} is shown`;
      panel.append(
        make("h4", {}, name), make("dl", {}, ...facts),
        ...(details.rounds.length > 1 ? [chart(curve, `${name}: ${details.label} by round`, "", null)] : []),
        ...(bars.length ? [make("table", { class: "bars", id: "client-labels" }, make("caption", {}, `Samples of the client by ${details.kind}, over all splits`), make("tbody", {}, ...bars))] : []),
      );
    }
    return { whole: make("div", { class: "chosen" }, make("label", {}, "Client ", list), said, panel), open };
  }

  const source = document.getElementById("client-details");
  for (const figure of document.querySelectorAll("figure")) {
    const written = figure.querySelector("script.chart-data");
    if (!written) continue;
    const data = JSON.parse(written.textContent);
    const clients = source && data.series.some((one) => one.clients.length) ? clientPanel(JSON.parse(source.textContent)) : null;
    const title = figure.querySelector("h3"), caption = figure.querySelector("figcaption");
    const whole = chart(data, title.textContent, caption.id, clients?.open ?? null);
    const swap = button("Picture", false, () => {
      const still = figure.classList.toggle("still");
      swap.setAttribute("aria-pressed", String(still));
    });
    figure.classList.add("alive");
    figure.querySelector(".picture").before(make("div", { class: "swap" }, swap), whole);
    if (clients) figure.append(clients.whole);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((redraw) => redraw()));
})();
