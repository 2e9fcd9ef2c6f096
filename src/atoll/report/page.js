"use strict";
// Tabs, light and dark, and plots, which are drawn when their tab is first opened.  Without JavaScript the page is one
// long text with all tables.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const tabs = [...document.querySelectorAll("nav a")];
  const panels = tabs.map((tab) => document.getElementById(tab.hash.slice(1)));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  // --- plots -------------------------------------------------------------------------------------------------------
  const template = () => {
    const style = getComputedStyle(document.body);
    const line = getComputedStyle(document.querySelector("nav")).borderBottomColor;
    const soft = getComputedStyle(document.querySelector("footer")).color;
    const card = getComputedStyle(document.querySelector("table").parentElement).backgroundColor;
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { color: soft }, automargin: true };
    const scene = { ...axis, showbackground: false, title: { font: { size: 13 } } };
    return {
      layout: {
        font: { family: style.fontFamily, color: style.color, size: 14 },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        hoverlabel: { bgcolor: card, bordercolor: line, font: { color: style.color } },
        xaxis: axis,
        yaxis: axis,
        scene: { xaxis: scene, yaxis: scene, zaxis: scene },
      },
    };
  };
  // On a phone a scene is narrow, and the camera steps back to show all of it.
  const narrow = (layout) => {
    const eye = Object.entries(layout.scene.camera.eye).map(([axis, value]) => [axis, 1.45 * value]);
    return { height: 340, scene: { ...layout.scene, camera: { eye: Object.fromEntries(eye), center: { z: -0.2 } } } };
  };
  const look = (figure, width) => ({
    height: 340,
    margin: { l: 52, r: 16, t: 32, b: 44 }, // the buttons have the top margin for themselves
    legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom" },
    showlegend: ["scatter", "bar"].includes(figure.data[0].type), // also of a single run: it tells which one it is
    ...figure.layout,
    ...(figure.layout.scene && width < 480 && narrow(figure.layout)),
    autosize: true,
    uirevision: "same", // keeps zoom and rotation when colors change
    template: template(),
  });
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: window.matchMedia("(hover: none)").matches ? false : "hover", // fingers zoom without buttons
    showSendToCloud: false, // a button that uploads the plot
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "resetCameraLastSave3d", "tableRotation"],
  };
  const draw = async (place) => {
    const figure = figures[place.id];
    try {
      await window.Plotly.react(place, figure.data, look(figure, place.clientWidth), config);
    } catch (error) {
      place.textContent = `This plot cannot be drawn: ${error.message}`;
    }
  };
  const drawAll = (panel) => {
    for (const place of panel.querySelectorAll(".plot")) {
      if (place.dataset.drawn) continue;
      place.dataset.drawn = "yes";
      draw(place);
    }
  };

  // --- tabs --------------------------------------------------------------------------------------------------------
  const open = (number, focus) => {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === number));
      tab.tabIndex = i === number ? 0 : -1;
      panels[i].classList.toggle("open", i === number);
    });
    if (focus) tabs[number].focus();
    const nav = tabs[number].parentElement; // scrollIntoView would move the page as well, away from its beginning
    const left = tabs[number].offsetLeft - nav.offsetLeft;
    const right = left + tabs[number].offsetWidth;
    if (left < nav.scrollLeft || right > nav.scrollLeft + nav.clientWidth) nav.scrollLeft = left - 24;
    drawAll(panels[number]);
  };
  const fromAddress = () => Math.max(0, panels.findIndex((panel) => `#${panel.id}` === location.hash));
  document.querySelector("nav").setAttribute("role", "tablist");
  tabs.forEach((tab, i) => {
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panels[i].id);
    panels[i].setAttribute("role", "tabpanel");
    tab.addEventListener("click", (event) => {
      event.preventDefault(); // the page should not jump
      history.replaceState(null, "", tab.hash);
      open(i, false);
    });
    tab.addEventListener("keydown", (event) => {
      const last = tabs.length - 1;
      const moves = { ArrowRight: i === last ? 0 : i + 1, ArrowLeft: i === 0 ? last : i - 1, Home: 0, End: last };
      if (!(event.key in moves)) return;
      event.preventDefault();
      open(moves[event.key], true);
    });
  });
  root.classList.add("tabbed");
  window.addEventListener("hashchange", () => open(fromAddress(), false));
  window.addEventListener("beforeprint", () => panels.forEach(drawAll));

  // --- light and dark ----------------------------------------------------------------------------------------------
  const recolor = () => document.querySelectorAll(".plot[data-drawn]").forEach(draw);
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    recolor();
  });
  dark.addEventListener("change", recolor);

  open(fromAddress(), false);
})();
