// The state of the engine, from /metrics once a second while the page is in front.

const PERIOD = 1000;

// Values by metric name, added up over label sets (replicas).
export function parseMetrics(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const split = line.lastIndexOf(" ");
    const name = line.slice(0, split).replace(/\{.*\}$/, "").replace(/^sglang:/, "");
    values.set(name, [...(values.get(name) ?? []), Number(line.slice(split + 1))]);
  }
  const sum = (name) => values.get(name)?.reduce((total, value) => total + value, 0);
  const mean = (name) => (values.has(name) ? sum(name) / values.get(name).length : undefined);
  return { sum, mean };
}

function show(find, { sum, mean }) {
  const set = (id, value) => (find(id).textContent = value);
  if (sum("num_running_reqs") === undefined) return set("state", "the engine does not answer");
  set("state", "serving");
  set("running", sum("num_running_reqs"));
  set("waiting", sum("num_queue_reqs"));
  set("throughput", sum("gen_throughput").toFixed(1));
  set("hits", `${(100 * mean("cache_hit_rate")).toFixed(1)} %`);
  const used = Math.ceil(sum("kv_used_tokens") / mean("page_size"));
  set("pages", `${used} of ${sum("num_pages")}`);
  find("usage").value = mean("token_usage");
}

export async function watchServer(find, headers) {
  const look = async () => {
    if (document.hidden) return;
    try {
      const response = await fetch("metrics", { headers: headers() });
      if (response.ok) show(find, parseMetrics(await response.text()));
      else if (response.status === 404) find("state").textContent = "start the server with --enable-metrics to see its state";
      else find("state").textContent = `the server answers ${response.status}`;
    } catch {
      find("state").textContent = "the server is gone";
    }
    if (!find("model").textContent) await name(find, headers);
  };
  await look();
  setInterval(look, PERIOD);
}

async function name(find, headers) {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.ok) find("model").textContent = (await response.json()).data[0].id;
  } catch {
    // It is asked for again at the next look.
  }
}
