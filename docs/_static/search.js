// The snippets of a search show sentences: cells of tables with marks only are left out.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    for (const cell of page.querySelectorAll("td"))
      if (!/[\p{L}\p{N}]/u.test(cell.textContent)) cell.remove();
    return textOf(page.documentElement.outerHTML, anchor);
  };
});
