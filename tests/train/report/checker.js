// Posts to the parent what a reader would see wrong with this page, and the color scheme that it is shown in.
(() => {
  const faults = [];
  addEventListener("error", e => faults.push(`error: ${e.message || "loading " + (e.target.src || e.target.href)}`), true);
  const log = console.error;
  console.error = (...words) => { faults.push(`console: ${words.join(" ")}`); log(...words); };
  const describe = node => `<${node.tagName.toLowerCase()}${node.className && node.className.baseVal === undefined ?
    "." + node.className : ""}> ${JSON.stringify(node.textContent.trim().slice(0, 40))}`;
  const rgb = text => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return text.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const background = node => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color[3] === 1) return color;
    }
    return [255, 255, 255, 1];
  };
  const hidden = node => node.closest("caption, title, details:not([open]) > :not(summary), head, script, style");
  const isScrolled = node => node.closest(".table");

  function checkTexts() {
    const texts = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
      const node = text.parentElement;
      if (!text.textContent.trim() || hidden(node)) continue;
      const range = document.createRange();
      range.selectNodeContents(text);
      const style = getComputedStyle(node);
      const ratio = contrast(rgb(style.color), background(node));
      if (ratio < 4.5) faults.push(`contrast ${ratio.toFixed(2)} of ${describe(node)}`);
      if (parseFloat(style.fontSize) < 11) faults.push(`small text ${style.fontSize} in ${describe(node)}`);
      for (const box of range.getClientRects()) {
        if (box.width < 1) continue;
        if (!isScrolled(node) && (box.right > innerWidth + 0.5 || box.left < -0.5))
          faults.push(`${describe(node)} leaves the page: ${box.left.toFixed()} … ${box.right.toFixed()}`);
        texts.push([box, node]);
      }
    }
    texts.sort((a, b) => a[0].top - b[0].top);
    for (let i = 0; i < texts.length; i++)
      for (let j = i + 1; j < texts.length && texts[j][0].top < texts[i][0].bottom; j++) {
        const [[a, one], [b, other]] = [texts[i], texts[j]];
        const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        // Lines of text are closer than their boxes; and what scrolls is clipped.
        if (width > 1 && height > 0.3 * Math.min(a.height, b.height) && isScrolled(one) === isScrolled(other))
          faults.push(`${describe(one)} overlaps ${describe(other)}`);
      }
  }

  // Most contrast of an opaque pixel with what is behind the image; in a figure, that of its text.
  function contrastOf(image) {
    const canvas = document.createElement("canvas");
    canvas.style.colorScheme = getComputedStyle(image).colorScheme;
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext("2d"), page = background(image);
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
    const colors = new Set();
    for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 250) colors.add(pixels.slice(i, i + 3).join());
    return Math.max(0, ...[...colors].map(color => contrast(color.split(",").map(Number), page)));
  }

  function checkFigures() {
    for (const image of document.querySelectorAll("img")) {
      if (!(image.alt || "").trim()) faults.push("an image without an alternative text");
      if (!image.complete || !image.naturalWidth) { faults.push(`an image that doesn't load: ${image.alt}`); continue; }
      const best = contrastOf(image);
      if (image.src.startsWith("data:image/svg") && best < 4.5) faults.push(`contrast ${best.toFixed(2)} of the figure ${image.alt}`);
      const box = image.getBoundingClientRect();
      if (box.width < 1) faults.push(`a figure of ${box.width} × ${box.height} px`);
    }
  }

  function checkStructure() {
    const ids = [...document.querySelectorAll("[id]")].map(node => node.id);
    ids.filter((id, i) => ids.indexOf(id) !== i).forEach(id => faults.push(`id ${id} is there twice`));
    for (const link of document.querySelectorAll("a[href^='#']"))
      if (!document.getElementById(decodeURIComponent(link.hash.slice(1)))) faults.push(`link to nowhere: ${link.hash}`);
    for (const row of document.querySelectorAll("tbody tr"))
      if (!row.id || !row.querySelector(`th[scope=row] a[href="#${row.id}"]`)) faults.push(`no link to ${describe(row)}`);
    for (const table of document.querySelectorAll("table"))
      if (!table.caption || !table.querySelector("thead th[scope=col]")) faults.push(`no caption or heads: ${describe(table)}`);
    if (!document.title || !document.documentElement.lang) faults.push("no title or language");
    let level = 0;
    for (const heading of document.querySelectorAll("h1, h2, h3")) {
      const now = Number(heading.tagName[1]);
      if (now > level + 1) faults.push(`heading ${describe(heading)} skips a level`);
      level = now;
    }
  }

  function checkPage() {
    const wide = document.documentElement.scrollWidth;
    if (wide > innerWidth) faults.push(`the page is ${wide} px wide, its window ${innerWidth}`);
    for (const node of document.body.querySelectorAll("*")) {
      const box = node.getBoundingClientRect();
      if (!hidden(node) && !isScrolled(node) && !node.closest("svg *") && box.width && box.right > innerWidth + 0.5 &&
          !node.closest(".xs")) faults.push(`${describe(node)} leaves the page at ${box.right.toFixed()} px`);
    }
    for (const one of performance.getEntriesByType("resource"))
      if (!one.name.startsWith("data:")) faults.push(`request: ${one.name}`);
  }

  addEventListener("load", () => {
    checkTexts();
    checkFigures();
    checkStructure();
    checkPage();
    const scheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    parent.postMessage({ name: window.name, scheme, faults: [...new Set(faults)] }, "*");
  });
})();
