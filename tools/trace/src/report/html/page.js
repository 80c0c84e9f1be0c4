// Shows the value under the pointer. The page is complete without it: tables hold the figures.
(() => {
  const tip = document.getElementById("tip");
  document.addEventListener("pointermove", (event) => {
    const text = event.target.dataset?.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18;
    const above = event.clientY - tip.offsetHeight - 12;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? above : below}px`;
  });
})();
