#!lua
-- parts: clock record wakeup single_flight
-- submit_one: what submit does, for a single request that is new, and simply waits. It makes submit's commands
-- in a straight line, since lists of arguments and tables cost the server as much again. Without allow-oom,
-- as submit.
-- Answers 1. Where anything is unusual nothing is done, the answer is nil, and submit is to be called.
local call, stats, name = redis.call, tag .. ':stats', tag .. ':req:' .. request_id
if call('EXISTS', name, tag .. ':paused') > 0 then return false end
if call('HEXISTS', tag .. ':environments', environment) == 0 then return false end
if digest ~= '' then
  local found = call('HMGET', tag .. ':phase', request_id, single_flight.key(environment, digest))
  if found[1] or found[2] then return false end
end
local waits, sent = 'waiting:' .. environment, 's:' .. environment
local known = call('HMGET', stats, 'minute', waits, sent, 'submitted')
local minute, waiting = tonumber(known[1] or 0), tonumber(known[2] or 0)
local submitted_here, submitted = tonumber(known[3] or 0), tonumber(known[4] or 0)
-- Any process may have written what stands there. Once a minute the totals are to be noted.
if not (minute and waiting and submitted_here and submitted) or now >= (minute + 1) * 60000 then return false end

local place = environment .. ':' .. priority
local list = tag .. ':wait:' .. place .. ':' .. tenant
local length = call('RPUSH', list, request_id)
if length > max_waiting then
  call('RPOP', list)
  return false
end
if length == 1 then call('RPUSH', tag .. ':ring:' .. place, tenant) end
local text = record.head({attempts = 0, priority = priority, submitted = now,
  deadline = deadline_ms > 0 and now + deadline_ms or 0, run_ms = run_ms, environment = environment,
  client = client, affinity = affinity, second_affinity = second_affinity, tenant = tenant, digest = digest}) .. body
call('SET', name, text)
if affinity ~= '' then
  call('HSET', stats, waits, waiting + 1, sent, submitted_here + 1, 'submitted', submitted + 1,
    'affinity:' .. environment, 1)
else
  call('HSET', stats, waits, waiting + 1, sent, submitted_here + 1, 'submitted', submitted + 1)
end
notify(environment, 1)
return 1
