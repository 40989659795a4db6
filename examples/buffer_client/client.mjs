// A rollout worker for `headway serve-buffer` in JavaScript: node client.mjs http://HOST:PORT [KEY]
const [buffer, key = "none"] = process.argv.slice(2);
const tries = 60; // half a second apart: a run that doesn't answer for so long is over

async function post(url, body, bearer = key) {
  const headers = { authorization: `Bearer ${bearer}`, "content-type": "application/json" };
  for (let tried = 0; tried < tries; tried++) { // until it is answered: the run may be away, to be resumed
    try {
      const response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
      const answer = await response.json();
      if (response.ok) return answer;
      throw Object.assign(new Error(answer.error.message), { refused: response.status });
    } catch (error) {
      if ((error.refused ?? 503) !== 503) throw error;
      await new Promise((done) => setTimeout(done, 500));
    }
  }
  console.error("the run doesn't answer any more");
  process.exit(1);
}

async function solve({ task, model, base_url, api_key }) {
  const messages = task.messages.length ? task.messages : [{ role: "user", content: task.prompt }];
  const answer = await post(`${base_url}/chat/completions`, { model, messages }, api_key);
  return Number(answer.choices[0].message.content.split("=").pop().trim() === task.answer); // your reward
}

while (true) {
  const lease = await post(`${buffer}/buffer/lease`, { wait_s: 20 });
  if (!lease) continue; // nothing was to do
  const { group, member, attempt } = lease;
  try {
    await post(`${buffer}/buffer/finish`, { group, member, attempt, reward: await solve(lease) });
  } catch (error) {
    console.error(error.refused, error.message); // the attempt is over: another one is offered
  }
}
