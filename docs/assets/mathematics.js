// Sets formulas; pymdownx.arithmatex marks them, and leaves \( \) or \[ \] around their text.
document$.subscribe(() => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const text = place.textContent.trim();
    if (/^\\[([]/.test(text)) {
      katex.render(text.slice(2, -2), place, { displayMode: text.startsWith("\\["), throwOnError: false, output: "htmlAndMathml" });
    }
  }
});
