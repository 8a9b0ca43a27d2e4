// Ways to bring an image in: choose files or a folder, drop them anywhere, or paste.

const MOST = 60; // files of one study that are sent; the server takes the images among them

/** Call `open(files, more)` for whatever is brought in; `more` is the number of files beyond MOST. */
export function listenForFiles(root, open) {
  const veil = root.querySelector("#veil");
  const take = (files) => { if (files.length) open(files.slice(0, MOST), Math.max(0, files.length - MOST)); };
  for (const input of root.querySelectorAll("input[type=file]")) {
    input.addEventListener("change", () => {
      const files = [...input.files];
      input.value = ""; // the same file may be chosen again
      take(files);
    });
  }
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    veil.hidden = false;
  });
  document.addEventListener("dragleave", (event) => { veil.hidden ||= !event.relatedTarget; });
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    veil.hidden = true;
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const files = entries.length ? (await Promise.all(entries.map(filesOf))).flat() : [...event.dataTransfer.files];
    take(files);
  });
  document.addEventListener("paste", (event) => take([...event.clipboardData.files]));
}

/** The files of a dropped file or folder, folders within it included. */
async function filesOf(entry) {
  if (entry.isFile) return [await new Promise((done, failed) => entry.file(done, failed))];
  const reader = entry.createReader();
  const inside = [];
  for (;;) { // a reader gives at most a hundred at a time
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!some.length) break;
    inside.push(...some);
  }
  return (await Promise.all(inside.map(filesOf))).flat();
}

/** Send files by Gradio's `upload`, each under a name of its own, so that its place cannot be guessed. */
export async function send(files, upload) {
  const paths = [];
  for (const file of files) {
    const random = crypto.getRandomValues(new Uint32Array(4)).join("");
    const {path} = await upload(new File([file], `${random}~${file.name || "pasted"}`, {type: file.type}));
    paths.push(path);
  }
  return paths;
}
