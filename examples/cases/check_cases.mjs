// Check a function of JavaScript with the cases that `polyattn check --write-cases DIR` writes.
//
//     node check_cases.mjs DIR [FILE]
//
// FILE exports `attention`, by default attention.mjs. It gets an object of the arguments of a case,
// arrays as {data, shape}, and returns {output, logsumexp} in float64, which are rounded to float32
// here. Cases in 16 bits are left out.

import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, file = join(import.meta.dirname, "attention.mjs")] = process.argv.slice(2);
if (!folder) throw new Error("name the folder: node check_cases.mjs DIR [FILE]");
const { attention } = await import(pathToFileURL(resolve(file)));

const ARRAYS = {
  F64: Float64Array, F32: Float32Array, I64: BigInt64Array, I32: Int32Array, BOOL: Uint8Array,
};

// A safetensors file is the length of its header, the header in JSON, and the bits of the arrays.
function readTensors(path) {
  const { buffer, byteOffset, byteLength } = readFileSync(path);
  const content = buffer.slice(byteOffset, byteOffset + byteLength);
  const length = Number(new DataView(content).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(content, 8, length)));
  return Object.fromEntries(
    Object.entries(header).filter(([, x]) => x.dtype in ARRAYS).map(([name, x]) => {
      const [start, end] = x.data_offsets.map((at) => 8 + length + at);
      const data = Array.from(new ARRAYS[x.dtype](content.slice(start, end)), Number);
      return [name, { data, shape: x.shape }];
    }),
  );
}

const tensors = readTensors(join(folder, "cases.safetensors"));
const listed = JSON.parse(readFileSync(join(folder, "cases.json"), "utf-8"));
if (listed.format !== "polyattn-cases" || listed.version !== 1) {
  throw new Error(`${folder} has another format: ${listed.format} ${listed.version}`);
}
const filled = (x) => Object.fromEntries(
  Object.entries(x).map(([name, y]) => [name, y?.tensor ? tensors[y.tensor] : y]),
);

// Return the elements of some entries along an axis, counted from the last one.
function taken({ data, shape }, rows, axis) {
  const at = shape.length + axis;
  const inner = shape.slice(at + 1).reduce((a, b) => a * b, 1);
  const kept = data.filter((_, n) => rows.includes(Math.floor(n / inner) % shape[at]));
  return { data: kept, shape: shape.with(at, rows.length) };
}

// Return what is wrong with a result, or null.
function fault(result, { exact, rest, limit, dtype, nan_for_infinity, row_axis }, rows) {
  const { data, shape } = row_axis ? taken(result, rows, row_axis) : result;
  if (String(shape) !== String(exact.shape)) return `shape ${shape}, must be ${exact.shape}`;
  for (const [n, full] of data.entries()) {
    const actual = dtype === "float32" ? Math.fround(full) : full;
    const expected = exact.data[n];
    const error = Math.abs(actual - expected - (rest?.data[n] ?? 0));
    const isNaNToo = Number.isNaN(actual)
      && (Number.isNaN(expected) || (nan_for_infinity && Math.abs(expected) === Infinity));
    if (actual !== expected && !isNaNToo && !(error <= limit.data[n])) {
      return `element ${n} is ${actual}, must be ${expected} ± ${limit.data[n]}`;
    }
  }
  return null;
}

let [wrong, leftOut] = [0, 0];
for (const { name, dtype, arguments: given, results, rows } of listed.cases) {
  if (!["float32", "float64"].includes(dtype)) {
    leftOut += 1;
    continue;
  }
  const computed = attention(filled(given));
  const faults = Object.entries(computed)
    .map(([what, result]) => [what, fault(result, filled(results[what]), rows)])
    .filter(([, text]) => text !== null);
  if (faults.length) console.log(`${name}: ${faults.map((x) => x.join(": ")).join("; ")}`);
  wrong += faults.length > 0;
}
console.log(`${listed.cases.length} cases: ${wrong} wrong, ${leftOut} left out`);
process.exitCode = wrong ? 1 : 0;
