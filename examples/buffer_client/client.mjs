// A rollout worker for `headway serve-buffer` in JavaScript: node client.mjs http://HOST:PORT [KEY]
const [buffer, key = "none"] = process.argv.slice(2);
const outageMs = 30_000; // a run that doesn't answer for so long is over
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

async function post(url, body, bearer = key) {
  const headers = { authorization: `Bearer ${bearer}`, "content-type": "application/json" };
  const response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error.message), { refused: response.status });
  return answer;
}

async function solve({ task, model, base_url, api_key }) {
  const messages = task.messages.length ? task.messages : [{ role: "user", content: task.prompt }];
  const answer = await post(`${base_url}/chat/completions`, { model, messages }, api_key);
  return Number(answer.choices[0].message.content.split("=").pop().trim() === task.answer); // your reward
}

let answeredMs = Date.now();
while (Date.now() - answeredMs < outageMs) {
  try {
    const lease = await post(`${buffer}/buffer/lease`, { wait_s: 20 });
    answeredMs = Date.now();
    if (!lease) continue; // nothing was to do
    const { group, member, attempt } = lease;
    await post(`${buffer}/buffer/finish`, { group, member, attempt, reward: await solve(lease) });
  } catch (error) {
    if (error.refused) console.error(error.refused, error.message); // the attempt is over: another one is offered
    else await sleep(500); // the run is away: it may be resumed
  }
}
