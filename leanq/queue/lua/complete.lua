#!lua flags=allow-oom
-- parts: clock record phase warmth deadline publish
-- complete: settles a request that no worker has claimed: it came along with its wake-up, and ended before a
-- claim could be back. Its result counts as if it had been claimed before.
-- Answers how many requests wait in its environment besides. Where it does not simply wait as the next of its
-- tenant, or anything else is unusual, nothing is done and the answer is nil: it is to be claimed.
local call, stats = redis.call, tag .. ':stats'
if call('HGET', tag .. ':phase', request_id) then return false end
local r = record.load(request_id)
if not r or r.environment ~= environment or r.attempts > 0 or r.detached or deadline.is_past(r) then
  return false
end
if call('EXISTS', tag .. ':paused', tag .. ':weights', tag .. ':quarantined:' .. environment) > 0 then
  return false
end
local ended, reasons = 'f:' .. environment .. ':' .. outcome, 'c:' .. environment .. ':' .. reason
local turns, waits, ways = 'turn:' .. environment, 'waiting:' .. environment, 'way:' .. way
local cpu, tenants_cpu = 'u_ms:' .. environment, 'u:' .. environment .. ':' .. r.tenant
local known = call('HMGET', stats, 'settled', ended, 'claimed', turns, waits, reasons, ways, cpu, tenants_cpu,
  'warm_hits', 'warm_misses')
for i = 1, #known do
  -- Any process may have written what stands there.
  if known[i] and not tonumber(known[i]) then return false end
end
-- A tenant that is not counted yet may find no room.
if cpu_ms > 0 and not known[9] then return false end

local place = environment .. ':' .. r.priority
local list = tag .. ':wait:' .. place .. ':' .. r.tenant
local first = call('LPOP', list)
if first ~= request_id then
  if first then call('LPUSH', list, first) end
  return false
end
-- It is in no list by now, so its reply comes before all that a key of another kind may end the script at. Its
-- client is told last, and asks for what it was not told of.
publish.reply(request_id, r.client, reply)
if call('EXISTS', list) == 0 then call('LREM', tag .. ':ring:' .. place, 1, r.tenant) end

local waiting = (known[5] or 0) - 1
local counts = {'settled', (known[1] or 0) + 1, ended, (known[2] or 0) + 1, 'claimed', (known[3] or 0) + 1,
  turns, (known[4] or 0) + 1, waits, waiting}
local n = #counts
local function count(name, before, more)
  counts[n + 1], counts[n + 2], n = name, (before or 0) + more, n + 2
end
if reason ~= '' then count(reasons, known[6], 1) end
if way ~= '' then count(ways, known[7], 1) end
if cpu_ms > 0 then count(cpu, known[8], cpu_ms); count(tenants_cpu, known[9], cpu_ms) end
if r.affinity ~= '' then
  if warmth.rank(r) < 3 then count('warm_hits', known[10], 1) else count('warm_misses', known[11], 1) end
end
call('HSET', stats, unpack(counts))
if r.affinity ~= '' and warm then warmth.note(environment, r.affinity) end
if r.digest ~= '' and remember_ms > 0 and fingerprint ~= '' then
  publish.write(tag .. ':verdict:' .. fingerprint .. ':' .. r.digest, reply, remember_ms)
end
publish.all()
return waiting
