"use strict";
// What a link points to is often folded away.
const unfold = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) { target.open = true; target.scrollIntoView(); }
};
addEventListener("hashchange", unfold);
unfold();

const send = async (form, output) => {
  const body = form.querySelector("textarea");
  const path = form.dataset.path.replace(/{(\w+)}/g, (_, name) => encodeURI(form.elements[name].value));
  const key = document.getElementById("key").value;
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { method: form.dataset.verb, headers, body: body?.value });
  output.textContent = `${response.status} ${response.statusText}\n`;
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  for (let part; reader && !(part = await reader.read()).done;) output.textContent += part.value;
};
for (const form of document.forms) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const output = form.nextElementSibling;
    output.hidden = false;
    output.textContent = "…";
    try { await send(form, output); } catch (error) { output.textContent += `\n${error}`; }
  });
}
