#!lua flags=allow-oom
-- parts: clock bulk wait_list wakeup publish counters settle isolated fair_queue lease waiting shares
-- claim: settles what a worker has finished, and leases it up to `want` requests of `environments`, in
-- one call; either part may be empty. A settlement is accepted only with the current token, or again
-- with the token that already won. `token` is that of all leases given out here. `busy`: requests in
-- flight besides those settled here; other than 0 keeps quarantined requests away.
-- Answers fenced, missing: the numbers of the settlements that were not accepted, and see settle.all;
-- request_ids, records, isolated: see lease.lua; held: size of the processing list; must_empty: 1 where this
-- worker should empty itself for a quarantined request; now_ms.
local must_empty = 0
local fenced, missing = settle.all()

-- What hardly ever is there: one question about all of it. Then the environments that are not held back.
local unusual, open = false, environments
if #environments > 0 then
  local names = {}
  for i, environment in ipairs(environments) do names[i] = tag .. ':quarantined:' .. environment end
  unusual = redis.call('EXISTS', tag .. ':paused', tag .. ':weights', unpack(names)) > 0
end
if unusual and redis.call('EXISTS', tag .. ':paused', tag .. ':weights') > 0 then
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

-- Which priorities of each environment have work. All environments' quarantined requests come before
-- any environment's other work, which would never let them be alone.
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
  -- A worker that leaves requests waiting wakes one more worker.
  for _, environment in ipairs(open) do
    if counters.value('waiting:' .. environment) > 0
      and (fair_queue.left[environment] or wait_list.any(environment)) then
      notify(environment, 1)
    end
  end
end
publish.all()
counters.write()
local held = redis.call('ZCARD', tag .. ':processing:' .. worker)
-- The lease of a worker that holds nothing may be a longer one, and there is nothing to be reaped.
if held > 0 then redis.call('ZADD', tag .. ':workers', now + lease_ms, worker) end
return answer({fenced = fenced, missing = missing, request_ids = lease.request_ids, records = lease.records,
  isolated = lease.isolated, must_empty = must_empty, now_ms = now, held = held})
