// What the page does beside htmx: the theme, the charts, whether it is live, and what went wrong.
"use strict";
(() => {
  const root = document.documentElement;

  // What a viewer has opened, focused or typed stays as it is when a part is swapped.
  Idiomorph.defaults.ignoreActiveValue = true;
  Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) =>
    !(name === "open" && node.tagName === "DETAILS");

  // The theme: as the system has it, until it is switched.
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("leanq-theme", root.dataset.theme);
    drawCharts();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts());

  // Whether what is shown is what is.
  const state = document.getElementById("state");
  let heardAt = 0;
  const show = (text, kind) => {
    if (state && state.textContent !== text) state.textContent = text;
    if (state) state.className = `state ${kind}`;
  };
  const watch = document.getElementById("watch");
  if (watch) {
    watch.addEventListener("htmx:sseOpen", (event) => {
      heardAt = Date.now();
      show("live", "live-now");
      const source = event.detail.source;
      source.addEventListener("trouble", (told) => show(told.data, "broken"));
      source.addEventListener("ended", () => {
        source.close();
        location.reload();
      });
    });
    watch.addEventListener("htmx:sseMessage", () => {
      heardAt = Date.now();
      show("live", "live-now");
    });
    watch.addEventListener("htmx:sseError", () => show("not connected; trying again", "broken"));
  }

  // What went wrong with a change, in the words of the gateway.
  const said = document.getElementById("said");
  let hiding = 0;
  const say = (text) => {
    said.textContent = text;
    said.hidden = false;
    clearTimeout(hiding);
    hiding = setTimeout(() => { said.hidden = true; }, 10000);
  };
  document.body.addEventListener("htmx:responseError", (event) => say(event.detail.xhr.responseText));
  document.body.addEventListener("htmx:sendError", () => say("The gateway cannot be reached."));

  // Ctrl+Enter checks.
  const check = document.getElementById("check");
  if (check) {
    check.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) check.requestSubmit();
    });
  }

  // The charts are made of the table's rows: start, accepted, refused, no verdict, wait, run, waiting, workers.
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const bars = uPlot.paths.bars({ size: [0.9, 40] });
  const seconds = (value) => {
    if (value === null || value === undefined) return "–";
    if (value < 10) return `${value.toFixed(1)} s`;
    return value < 120 ? `${value.toFixed(0)} s` : `${(value / 60).toFixed(0)} min`;
  };
  const whole = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
  const charts = [];

  // Stacked: each series is drawn over the sums of those behind it.
  const kinds = {
    results: {
      bars: true,
      series: [["no verdict", "--chart-leanq"], ["refused", "--chart-bad"], ["accepted", "--chart-good"]],
      data: (rows) => {
        const of = (number) => rows.map((row) => row[number]);
        const [good, bad, none] = [of(1), of(2), of(3)];
        return {
          shown: [rows.map((_, i) => good[i] + bad[i] + none[i]), rows.map((_, i) => good[i] + bad[i]), good],
          told: [none, bad, good],
        };
      },
      value: whole,
    },
    times: {
      series: [["p99", "--chart-line-2"], ["p50", "--chart-line"]],
      data: (rows) => {
        const both = [rows.map((row) => row[4]), rows.map((row) => row[5])];
        return { shown: both, told: both };
      },
      value: seconds,
    },
    queue: {
      series: [["waiting", "--chart-line-2"], ["workers", "--chart-line"]],
      data: (rows) => {
        const both = [rows.map((row) => row[6]), rows.map((row) => row[7])];
        const known = both[1].some((value) => value !== null) ? both : both.slice(0, 1);
        return { shown: known, told: known };
      },
      value: whole,
    },
  };

  const drawCharts = () => {
    const table = document.getElementById("history-data");
    if (!table) return;
    while (charts.length) charts.pop().destroy();
    const rows = [...table.querySelectorAll("tr[data-row]")].map((row) => JSON.parse(row.dataset.row));
    for (const [name, kind] of Object.entries(kinds)) {
      const place = document.getElementById(`chart-${name}`);
      place.classList.toggle("empty", !rows.length);
      if (!rows.length) continue;
      const { shown, told } = kind.data(rows);
      const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: `11px ${color("--sans")}` };
      const end = Date.now() / 1000;
      const chart = new uPlot({
        width: place.clientWidth,
        height: 160,
        tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "Etc/UTC"),
        cursor: { y: false, points: { size: 5 } },
        scales: { x: { range: [end - 86400, end + 300] }, y: { range: (_, __, top) => [0, Math.max(1, top * 1.08)] } },
        axes: [
          { ...axis, space: 60, size: 28, values: (_, ticks) => ticks.map((time) => new Date(time * 1000).toISOString().slice(11, 16)) },
          { ...axis, size: 52, values: (_, ticks) => ticks.map((value) => (kind.value === seconds ? seconds(value) : Number.isInteger(value) ? whole(value) : "")) },
        ],
        series: [
          { label: "UTC", value: (_, time) => new Date((time ?? rows[rows.length - 1][0]) * 1000).toISOString().slice(11, 16) },
          ...kind.series.slice(0, shown.length).map(([label, paint], number) => ({
            label,
            stroke: color(paint),
            width: kind.bars ? 0 : 1.5,
            spanGaps: false,
            points: { show: !kind.bars && rows.length < 4, size: 5 },
            ...(kind.bars ? { fill: color(paint), paths: bars } : {}),
            value: (_, __, ___, index) => kind.value(told[number][index ?? rows.length - 1]),
          })),
        ],
      }, [rows.map((row) => row[0]), ...shown], place);
      charts.push(chart);
    }
  };
  let drawing = 0;
  document.body.addEventListener("htmx:afterSwap", (event) => {
    if (event.target.id === "history-data") drawCharts();
  });
  addEventListener("resize", () => {
    clearTimeout(drawing);
    drawing = setTimeout(drawCharts, 150);
  });
  drawCharts();
})();
