"use strict";
// Draws the figures that are in view or chosen, and moves those that can be scrubbed to the step of the slider.
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const slider = document.getElementById("step");
  const drawn = (window.reportDrawn = new Map()); // number of a figure -> what vegaEmbed returned
  const failures = (window.reportFailures = []);
  const element = (number) => document.getElementById(`figure-${number}`);

  // The rows of one frame; rows_of in figures.py does the same.
  function rowsOf(series, frame) {
    return series.flatMap((each) => {
      const fields = Object.entries(each).map(([key, value]) => [key, Array.isArray(value?.[0]) ? value[frame] : value]);
      const count = fields.reduce((most, [, value]) => (Array.isArray(value) ? Math.max(most, value.length) : most), 0) || 1;
      return Array.from({ length: count }, (_, i) =>
        Object.fromEntries(fields.map(([key, value]) => [key, Array.isArray(value) ? value[i] : value])));
    });
  }

  // The last measurement at or before the step of the slider.
  function frameOf(figure) {
    if (!figure.frames.length) return 0;
    const step = content.steps[Number(slider.value)];
    return Math.max(0, figure.frames.findLastIndex((each) => each <= step));
  }

  function tell(number, frame) {
    const figure = content.figures[number];
    if (figure.frames.length)
      element(number).querySelector(".at").textContent = ` at step ${figure.frames[frame].toLocaleString("en")}`;
  }

  async function draw(number) {
    if (drawn.has(number)) return;
    drawn.set(number, null);
    const figure = content.figures[number];
    const frame = frameOf(figure);
    const spec = { ...figure.spec, data: { name: "rows", values: rowsOf(figure.series, frame) } };
    if (spec.width === "container") spec.autosize = { type: "fit-x", contains: "padding" };
    try {
      const options = {
        mode: "vega-lite", renderer: "canvas", config: content.themes[dark.matches ? "dark" : "light"],
        actions: { export: true, source: false, compiled: false, editor: false }, downloadFileName: figure.title,
        tooltip: { theme: dark.matches ? "dark" : "light" },
      };
      const result = await vegaEmbed(element(number).querySelector(".plot"), spec, options);
      drawn.set(number, { ...result, frame });
      tell(number, frame);
      if (frameOf(figure) !== frame) move(number);
    } catch (error) {
      failures.push(`${figure.title}: ${error}`);
      element(number).querySelector(".plot").textContent = `This figure could not be drawn: ${error}`;
    }
    element(number).dataset.drawn = "";
  }

  function move(number) {
    const result = drawn.get(number);
    const frame = frameOf(content.figures[number]);
    if (!result || result.frame === frame) return;
    result.frame = frame;
    const rows = rowsOf(content.figures[number].series, frame);
    result.view.data("rows", rows).runAsync();
    tell(number, frame);
  }

  // -- choosing ---------------------------------------------------------------------------------------------------
  function choose(section) {
    const chosen = {};
    for (const select of section.querySelectorAll("select")) chosen[select.name] = select.value;
    for (const figure of section.querySelectorAll("figure")) {
      const choice = content.figures[Number(figure.dataset.number)].choice;
      figure.hidden = Object.entries(choice).some(([name, options]) => name in chosen && !options.includes(chosen[name]));
    }
    section.querySelector(".none").hidden = section.querySelector("figure:not([hidden])") !== null;
  }
  for (const section of document.querySelectorAll("section"))
    for (const select of section.querySelectorAll("select")) select.addEventListener("change", () => choose(section));

  // -- what is in view first, the rest when there is time ---------------------------------------------------------
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(Number(entry.target.dataset.number));
  }, { rootMargin: "300px" });
  const figures = [...document.querySelectorAll("figure[data-number]")];
  figures.forEach((figure) => seen.observe(figure));
  const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 1));
  async function drawRest() {
    const next = figures.find((figure) => !figure.hidden && !drawn.has(Number(figure.dataset.number)));
    if (next) {
      await draw(Number(next.dataset.number));
      idle(drawRest);
    } else if (!document.documentElement.dataset.ready) {
      document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds until all was drawn
    }
  }
  idle(drawRest);
  const rest = () => idle(drawRest);
  document.addEventListener("change", rest);

  // -- scrubbing --------------------------------------------------------------------------------------------------
  if (slider) {
    const output = document.getElementById("step-shown");
    const scrub = () => {
      const text = content.steps[Number(slider.value)].toLocaleString("en");
      output.textContent = text;
      slider.setAttribute("aria-valuetext", `step ${text}`);
      for (const [number, result] of drawn) if (result) move(number);
    };
    slider.addEventListener("input", scrub);
    const play = document.getElementById("play");
    let timer = null;
    const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (Number(slider.value) >= content.steps.length - 1) slider.value = 0;
      play.textContent = "Stop";
      timer = setInterval(() => {
        if (Number(slider.value) >= content.steps.length - 1) return stop();
        slider.value = Number(slider.value) + 1;
        scrub();
      }, 250);
      scrub();
    });
    scrub();
  }

  // -- dark and light ---------------------------------------------------------------------------------------------
  dark.addEventListener("change", () => {
    const again = [...drawn.keys()];
    for (const result of drawn.values()) result?.finalize();
    drawn.clear();
    again.forEach(draw);
  });
})();
