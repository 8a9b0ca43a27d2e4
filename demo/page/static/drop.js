// Files dropped or pasted anywhere are opened like files chosen with the button.
function send(files) {
  const chosen = document.querySelector("#way input[type=file]");
  chosen.files = files;
  chosen.dispatchEvent(new Event("change", {bubbles: true}));
}
const veil = find(".veil");
const carriesFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
document.addEventListener("dragover", (event) => { if (carriesFiles(event)) { event.preventDefault(); veil.hidden = false; } });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) veil.hidden = true; });
document.addEventListener("drop", (event) => {
  veil.hidden = true;
  if (carriesFiles(event)) { event.preventDefault(); send(event.dataTransfer.files); }
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData?.files.length && !event.target.closest("input, textarea")) send(event.clipboardData.files);
});
