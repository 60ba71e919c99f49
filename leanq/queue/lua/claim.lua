#!lua flags=allow-oom
-- parts: clock bulk wait_list wakeup publish counters settle isolated reservations fair_queue lease recall waiting shares
-- claim: settles what a worker has finished, and leases it up to `want` requests of `environments`, in
-- one call; either part may be empty. A settlement is accepted only with the current token, or again
-- with the token that already won. `token` is that of all leases given out here. `busy`: requests in
-- flight besides those settled here; other than 0 keeps quarantined requests away.
-- Answers accepted: per settlement 1 or 0 (fenced); jobs: see lease.lua; held: size of the processing
-- list; must_empty: 1 where this worker should empty itself for a quarantined request; again_ms: after how
-- long it should claim again, to watch over reservations (0: it need not); now_ms; has_affinity: 1 where
-- requests of these environments may be reserved to workers.
local must_empty, again_ms, has_affinity, asks = 0, 0, false, want > 0
local accepted = settle.all()

-- The environments that are not held back, and what :stats says of each.
local open = environments
if #environments > 0 and redis.call('EXISTS', tag .. ':paused', tag .. ':weights') > 0 then
  lease.shares = settle.shares or open_shares()
  open = {}
  for _, environment in ipairs(environments) do
    if not wait_list.is_paused('e', environment) then open[#open + 1] = environment end
  end
end
local fields, stats = {}, {}
for i, environment in ipairs(open) do
  fields[3 * i - 2], fields[3 * i - 1] = 'turn:' .. environment, 'waiting:' .. environment
  fields[3 * i] = 'affinity:' .. environment
end
for i, value in ipairs(bulk.call('HMGET', tag .. ':stats', fields)) do
  stats[fields[i]] = tonumber(value or 0)
end
for _, environment in ipairs(open) do
  has_affinity = has_affinity or stats['affinity:' .. environment] > 0
end
if has_affinity then reservations.reassign() end

-- Which priorities of each environment have work. All environments' quarantined requests come before
-- any environment's other work, which would never let them be alone.
local priorities = {}
for i, environment in ipairs(want > 0 and open or {}) do
  local ring, filled = tag .. ':ring:' .. environment .. ':', {}
  local one, zero, two, quarantined =
    unpack(bulk.filled({ring .. 1, ring .. 0, ring .. 2, tag .. ':quarantined:' .. environment}))
  if zero then filled[#filled + 1] = 0 end
  if one then filled[#filled + 1] = 1 end
  if two then filled[#filled + 1] = 2 end
  priorities[i] = filled
  local became = quarantined and want > 0 and isolated.claim(environment)
  if became then want = 0 end
  if became == 'must_empty' then must_empty = 1 end
end
local reserved = has_affinity and reservations.claim(want) or 0
want = want - reserved
for i, environment in ipairs(open) do
  if want > 0 then
    local turn, chooses = stats['turn:' .. environment], stats['affinity:' .. environment] > 0
    want = want - fair_queue.claim(environment, priorities[i], want, turn, chooses)
  end
end
if has_affinity then
  recall(worker)
  if want > 0 then redis.call('HSET', tag .. ':available', worker, want) end
  if asks then again_ms = reservations.watch(reserved) end
end
lease.write()
local shares = lease.shares or settle.shares
if shares then shares.write() end

if #lease.jobs > 0 or waiting.popped >= waiting.MAX_POPPED or must_empty == 1 then
  -- A worker that leaves requests waiting wakes one more worker.
  for _, environment in ipairs(open) do
    local name = 'waiting:' .. environment
    if stats[name] + (counters.added[name] or 0) > 0 and wait_list.any(environment) then
      notify(environment, 1)
    end
  end
end
publish.all()
counters.write()
redis.call('ZADD', tag .. ':workers', now + lease_ms, worker)
return answer({accepted = accepted, jobs = lease.jobs, must_empty = must_empty, again_ms = again_ms,
  now_ms = now, held = redis.call('ZCARD', tag .. ':processing:' .. worker), has_affinity = has_affinity and 1 or 0})
