// node draw.mjs DASHBOARD.json http://PROMETHEUS OUT.png CHROMIUM 'from=…&to=…&scrape=…&width=…&theme=…'
import fs from "node:fs";
import { chromium } from "playwright-core";
import { build, preview } from "vite";

const [dashboard, prometheus, out, executablePath, query] = process.argv.slice(2);
const root = import.meta.dirname;
const icons = `${root}/node_modules/@grafana/ui/dist/public`; // where a Grafana server has /public/build
const served = ({ middlewares }) => {
  middlewares.use("/dashboard.json", (_, answer) => answer.end(fs.readFileSync(dashboard)));
  middlewares.use("/public/build", ({ url }, answer) => answer.setHeader("content-type", "image/svg+xml").end(fs.readFileSync(icons + url)));
};
const shared = { configFile: false, root, logLevel: "error" };
await build({ ...shared, esbuild: { jsx: "automatic" }, build: { target: "es2022", minify: false, chunkSizeWarningLimit: 1e6 } });
const preferred = { host: "127.0.0.1", port: 0, proxy: { "/api": prometheus } };
const server = await preview({ ...shared, preview: preferred, plugins: [{ name: "served", configurePreviewServer: served }] });
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const wrong = [];
try {
  const width = Number(new URLSearchParams(query).get("width"));
  const page = await browser.newPage({ viewport: { width, height: 1000 } });
  page.on("pageerror", (error) => wrong.push(error.stack));
  await page.goto(`http://127.0.0.1:${server.httpServer.address().port}/?${query}`);
  await page.waitForFunction(() => document.title === "drawn", null, { timeout: 300_000 });
  wrong.push(...(await page.evaluate(() => document.problems)));
  await (await page.$("#page")).screenshot({ path: out });
} catch (error) {
  wrong.push(error.message);
} finally {
  await browser.close();
  await server.close();
}
console.log(wrong.join("\n") || `Written: ${out}`);
process.exit(wrong.length ? 1 : 0);
