// Looks at the report from inside the browser and leaves what it saw, as JSON, in the element #page-check.
addEventListener("load", () => {
  const problems = [];
  const box = (element) => element.getBoundingClientRect();
  const name = (element) => `${element.tagName} "${(element.textContent || "").slice(0, 40)}"`;

  const plots = [...document.querySelectorAll("svg[role=img]")].map((svg) => {
    const texts = [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim());
    const frame = box(svg);
    for (const text of texts) {
      const at = box(text);
      const inside = at.left >= frame.left - 1 && at.right <= frame.right + 1 && at.top >= frame.top - 1 && at.bottom <= frame.bottom + 1;
      if (!inside) problems.push(`${svg.id}: ${name(text)} leaves the picture`);
    }
    for (const [index, one] of texts.entries()) {
      for (const other of texts.slice(index + 1)) {
        const [a, b] = [box(one), box(other)];
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 2) problems.push(`${svg.id}: ${name(one)} lies on ${name(other)}`);
      }
    }
    return {
      id: svg.id,
      title: svg.querySelector("title")?.textContent || "",
      description: svg.querySelector("desc")?.textContent || "",
      lines: svg.querySelectorAll("polyline").length,
      points: Math.min(...[...svg.querySelectorAll("polyline")].map((line) => line.points.length)),
      bars: [...svg.querySelectorAll("rect:not(.hover)")].filter((bar) => bar.width.baseVal.value > 0).length,
      dots: svg.querySelectorAll("circle").length,
      tips: svg.querySelectorAll("[data-tip]").length,
      width: frame.width,
    };
  });

  if (document.documentElement.scrollWidth > innerWidth) problems.push("the page scrolls sideways");
  for (const element of document.querySelectorAll("main *")) {
    const scrolls = element.closest(".wide") || element.closest("svg");
    if (!scrolls && element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0) {
      problems.push(`${name(element)} overflows`);
    }
  }

  const channels = (color) => color.match(/[\d.]+/g).map(Number);
  const luminance = (color) => {
    const [red, green, blue] = channels(color).map((channel) => {
      const share = channel / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    const part = [...element.classList].find((word) => word.startsWith("on-"));
    if (part) return getComputedStyle(document.querySelector(`rect.${part.slice(3)}`)).fill;
    for (let parent = element; parent; parent = parent.parentElement) {
      const color = getComputedStyle(parent).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const readable = (element, color, least) => {
    const found = contrast(color, behind(element));
    if (found < least) problems.push(`${name(element)} ${element.classList} has contrast ${found.toFixed(2)}, less than ${least}`);
  };
  for (const text of document.querySelectorAll("svg text")) readable(text, getComputedStyle(text).fill, 4.5);
  for (const curve of document.querySelectorAll(".curve")) readable(curve, getComputedStyle(curve).stroke, 3);
  for (const element of document.querySelectorAll("h1, h2, p, li, td, th, b, span")) {
    readable(element, getComputedStyle(element).color, 4.5);
  }

  const strip = document.querySelector(".hover");
  strip?.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 300, clientY: 300 }));
  const tip = document.getElementById("tip");

  const seen = {
    problems,
    plots,
    tip: tip.hidden ? "" : tip.textContent,
    background: luminance(getComputedStyle(document.body).backgroundColor),
    fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
    sections: [...document.querySelectorAll("section")].map((section) => section.id),
    cells: [...document.querySelectorAll("td")].map((cell) => cell.textContent),
  };
  const verdict = document.createElement("script");
  verdict.type = "application/json";
  verdict.id = "page-check";
  verdict.textContent = JSON.stringify(seen).replaceAll("<", "\\u003c");
  document.body.append(verdict);
});
