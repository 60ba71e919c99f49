#!lua flags=allow-oom
-- parts: clock bulk wait_list publish counters settle isolated fair_queue lease waiting shares
-- parts: after_claim lasting left take_back
-- claim: settles finished requests, and leases up to `want` requests of `environments`.
-- Either part may be empty. A settlement needs the current token; a repeated one needs the token that won.
-- `token`: the token of all leases given out here. `busy`: requests in flight besides those settled here;
-- above 0 it keeps quarantined requests away.
-- Answers now_ms, and:
--   `fenced`: the numbers of settlements without the current token. `missing`: see settle.all.
--   `request_ids`, `records`, `isolated`: see lease.lua. `held`: size of the processing list.
--   `must_empty`: 1 if this worker should empty itself for a quarantined request.
local must_empty = 0
local fenced, missing = settle.all()

-- Ask one question about all that is rare. Then leave out the environments that are held back.
local unusual, open = false, environments
if #environments > 0 then
  local names = {}
  for i, environment in ipairs(environments) do
    names[2 * i - 1], names[2 * i] = tag .. ':quarantined:' .. environment, left.key(environment, record.VERSION)
  end
  unusual = redis.call('EXISTS', tag .. ':paused', lasting .. ':weights', unpack(names)) > 0
end
for _, environment in ipairs(unusual and environments or {}) do take_back(environment) end
if unusual and redis.call('EXISTS', tag .. ':paused', lasting .. ':weights') > 0 then
  lease.shares = settle.shares or open_shares()
  open = {}
  for _, environment in ipairs(environments) do
    if not wait_list.is_paused('e', environment) then open[#open + 1] = environment end
  end
end
if #open > 0 then
  local names = {'claimed', 'warm_hits'}
  for _, environment in ipairs(open) do
    local n = #names
    names[n + 1], names[n + 2] = 'turn:' .. environment, 'waiting:' .. environment
    names[n + 3] = 'affinity:' .. environment
  end
  counters.read(names)
end

-- Find the priorities with work in each environment. All environments' quarantined requests come before any
-- other work, which would never let them be alone.
local priorities = {}
for i, environment in ipairs(want > 0 and open or {}) do
  priorities[i] = wait_list.filled_priorities(environment)
  local became = unusual and want > 0 and isolated.claim(environment)
  if became then want = 0 end
  if became == 'must_empty' then must_empty = 1 end
end
for i, environment in ipairs(open) do
  if want > 0 then
    local turn = counters.value('turn:' .. environment)
    want = want - fair_queue.claim(environment, priorities[i], want, turn, counters.has_affinity(environment))
  end
end
lease.write()
local shares = lease.shares or settle.shares
if shares then shares.write() end

if #lease.request_ids > 0 or waiting.popped >= waiting.MAX_POPPED or must_empty == 1 then
  for _, environment in ipairs(open) do after_claim.wake_another(environment, fair_queue.left[environment]) end
end
publish.all()
counters.write()
local held = redis.call('ZCARD', tag .. ':processing:' .. worker)
after_claim.extend_lease(held)
return answer({fenced = fenced, missing = missing, request_ids = lease.request_ids, records = lease.records,
  isolated = lease.isolated, must_empty = must_empty, now_ms = now, held = held})
