// The same counting as checks.py, for Node: see there for the environment that a script gets.

export const url = process.env.REEF_URL
export const model = process.env.REEF_MODEL

let passed = 0
let failed = 0

export function that(name, holds, seen) {
  if (holds) {
    passed += 1
    console.log(`ok    ${name}`)
  } else {
    failed += 1
    console.log(`FAIL  ${name}: ${JSON.stringify(seen)}`)
  }
}

export function equal(name, seen, wanted) {
  const [left, right] = [JSON.stringify(seen), JSON.stringify(wanted)]
  that(name, left === right, `${left} is not ${right}`)
}

// That `action` throws what `holds` is true of.
export async function throws(name, action, holds) {
  try {
    await action()
  } catch (error) {
    return that(name, holds(error), `${error?.name} ${error?.message}`)
  }
  that(name, false, "nothing was thrown")
}

// Runs the parts one after the other; what one throws counts against it alone.
export async function run(parts, did) {
  for (const part of parts) {
    try {
      await part()
    } catch (error) {
      console.log(error)
      that(part.name, false, String(error))
    }
  }
  console.log(`${passed} checks passed, ${failed} failed: ${did}`)
  process.exit(failed || !passed ? 1 : 0)
}

// The sum of one series of /metrics.
export async function metric(name) {
  const text = await (await fetch(`${url}/metrics`)).text()
  const lines = text.split("\n").filter((line) => line.split(/[{ ]/)[0] === name)
  return lines.reduce((sum, line) => sum + Number(line.split(" ").pop()), 0)
}

// Whether nothing runs any more, within 20 s.
export async function idle() {
  for (let tries = 0; tries < 100; tries += 1) {
    if ((await metric("vllm:num_requests_running")) === 0) return true
    await new Promise((wake) => setTimeout(wake, 200))
  }
  return false
}
