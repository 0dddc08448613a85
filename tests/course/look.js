// What tests/course/test_interactive.py looks at in a page.

/** As the contrast of WCAG 2 has it, of red, green and blue. */
const luminance = (c) => c.map((p) => p / 255)
                             .map((p) => p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4)
                             .reduce((all, p, i) => all + p * [0.2126, 0.7152, 0.0722][i], 0);
const parse = (text) => text.match(/[\d.]+/g).map(Number);

/** What is too wide, too pale, cannot have the focus or does not show it, or has no name. */
function look(least) {
  const root = document.documentElement, width = root.clientWidth;
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const visible = (element) =>
      element.getClientRects().length > 0 && getComputedStyle(element).visibility !== "hidden";
  const pale = [], unreached = [], unnamed = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !visible(element) || element.closest("script, :disabled, option")) continue;
    const style = getComputedStyle(element),
          levels =
              [parse(style.color).slice(0, 3), background(element).slice(0, 3)].map(luminance).sort(
                  (a, b) => b - a),
          contrast = (levels[0] + 0.05) / (levels[1] + 0.05);
    if (contrast < (parseFloat(style.fontSize) >= 24 ? least.large : least.text))
      pale.push(
          `${element.tagName} '${element.textContent.trim().slice(0, 30)}' ${contrast.toFixed(2)}`);
  }
  for (const control of document.querySelectorAll(
           "a[href], button, input, select, canvas, [onclick], [role=button], .scroll")) {
    if (!visible(control) || control.disabled) continue;
    control.focus({focusVisible: true});
    if (document.activeElement !== control || control.tabIndex < 0)
      unreached.push(control.outerHTML.slice(0, 60));
    else if (getComputedStyle(control).outlineStyle === "none")
      unreached.push("no outline: " + control.outerHTML.slice(0, 60));
    const label = [...(control.labels || [])].map((each) => each.textContent).join(""),
          own = control.matches("a, button") ? control.textContent : "";
    if (!(control.getAttribute("aria-label") || label || own).trim())
      unnamed.push(control.outerHTML.slice(0, 60));
  }
  const wide = [...document.querySelectorAll("body *")]
                   .filter(
                       (e) => visible(e) && !e.closest(".scroll") &&
                           e.getBoundingClientRect().right > width + 0.5)
                   .map((e) => e.outerHTML.slice(0, 60));
  return {
    overflow: root.scrollWidth - root.clientWidth,
    wide,
    pale,
    unreached,
    unnamed,
    letters: document.body.innerText.length
  };
}
