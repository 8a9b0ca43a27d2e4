// Dark, unless the reader has chosen light.
const set = (light) => document.body.classList.toggle("dark", !light);
set(localStorage.getItem("cbmir-light") === "1");
element.querySelector(".look").addEventListener("click", () => {
  const light = document.body.classList.contains("dark");
  localStorage.setItem("cbmir-light", light ? "1" : "0");
  set(light);
});
