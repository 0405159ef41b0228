// Attention row by row: what check_cases.mjs checks.

// An element of a tensor {data, shape}, whose last axes are those of the index and broadcast.
export function element(tensor, ...index) {
  let at = 0;
  const skipped = index.length - tensor.shape.length;
  tensor.shape.forEach((length, axis) => {
    at = at * length + (length === 1 ? 0 : index[axis + skipped] ?? 0);
  });
  return tensor.data[at];
}

const numberOf = (x, item) => (typeof x === "number" ? x : element(x, ...item));

// Return the output (..., H, L, E) and the logsumexp (..., H, L), in the caller's layout.
export function attention({
  query, key, value, mask, bias, is_causal, window, query_offset, key_lengths, block_table, scale,
  softcap, sinks, layout,
}) {
  const isLengthFirst = layout === "...LHD";
  const hasHeads = query.shape.length > 2;
  const place = (item, h, i, d) => {
    if (!hasHeads) return [i, d];
    return isLengthFirst ? [...item, i, h, d] : [...item, h, i, d];
  };
  const sizes = (x) => {
    const [a, b, size] = hasHeads ? x.shape.slice(-3) : [1, ...x.shape];
    return isLengthFirst ? [b, a, size] : [a, b, size];
  };
  const [H, L, D] = sizes(query);
  const [G, pageLength] = sizes(key);
  const E = sizes(value)[2];
  const S = block_table ? pageLength * block_table.shape.at(-1) : pageLength;
  const shared = block_table ? [query] : [query, key, value];
  const ranks = shared.map((x) => x.shape.slice(0, -3));
  const rank = Math.max(...ranks.map((x) => x.length));
  const batch = Array.from({ length: rank }, (_, axis) => {
    const lengths = ranks.map((x) => x[axis - rank + x.length] ?? 1);
    return lengths.find((n) => n !== 1) ?? 1;
  });
  // A page of a pool holds the keys of an item that its table says.
  const stored = (pool, item, g, j, d) => {
    if (!block_table) return element(pool, ...place(item, g, j, d));
    const page = element(block_table, ...item, Math.floor(j / pageLength));
    return element(pool, ...place([page], g, j % pageLength, d));
  };
  const factor = scale ?? 1 / Math.sqrt(Math.max(D, 1));
  const [left, right] = window ?? [null, null];

  function row(item, h, i) {
    const g = Math.floor(h / (H / G));
    const end = numberOf(key_lengths ?? S, item);
    const position = i + numberOf(query_offset ?? end - L, item);
    const keys = [];
    const scores = [];
    for (let j = 0; j < end; j++) {
      if (is_causal && j > position) continue;
      if (left !== null && j < position - left) continue;
      if (right !== null && j > position + right) continue;
      if (mask && !element(mask, ...item, h, i, j)) continue;
      const added = bias ? element(bias, ...item, h, i, j) : 0;
      if (added === -Infinity) continue;
      let score = 0;
      for (let d = 0; d < D; d++) {
        score += element(query, ...place(item, h, i, d)) * stored(key, item, g, j, d);
      }
      score *= factor;
      if (softcap) score = softcap * Math.tanh(score / softcap);
      keys.push(j);
      scores.push(score + added);
    }
    const sink = sinks ? element(sinks, h) : -Infinity;
    const highest = Math.max(sink, ...scores);
    const output = new Array(E).fill(0);
    if (highest === -Infinity) return [output, -Infinity];
    const weights = scores.map((score) => Math.exp(score - highest));
    const total = weights.reduce((sum, weight) => sum + weight, 0) + Math.exp(sink - highest);
    keys.forEach((j, n) => {
      for (let e = 0; e < E; e++) output[e] += (weights[n] / total) * stored(value, item, g, j, e);
    });
    return [output, highest + Math.log(total)];
  }

  const items = batch.reduce(
    (all, length) => all.flatMap((at) => Array.from({ length }, (_, n) => [...at, n])),
    [[]],
  );
  const outputs = [];
  const logsumexps = [];
  for (const item of items) {
    for (let n = 0; n < H * L; n++) {
      const [h, i] = isLengthFirst ? [n % H, Math.floor(n / H)] : [Math.floor(n / L), n % L];
      const [output, logsumexp] = row(item, h, i);
      outputs.push(...output);
      logsumexps.push(logsumexp);
    }
  }
  const heads = hasHeads ? (isLengthFirst ? [L, H] : [H, L]) : [L];
  return {
    output: { data: outputs, shape: [...batch, ...heads, E] },
    logsumexp: { data: logsumexps, shape: [...batch, ...heads] },
  };
}
