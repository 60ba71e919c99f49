#!lua
-- parts: clock record wakeup single_flight counters
-- submit_one: does what submit does for a single new request that simply waits. It makes submit's commands
-- in a straight line, since lists of arguments and tables cost the server as much again. It has no
-- allow-oom, as submit.
-- Answers 1. In an unusual case it does nothing and returns nil, and submit has to be called.
local call, name = redis.call, tag .. ':req:' .. request_id
if call('EXISTS', name, tag .. ':paused') > 0 then return false end
if call('HEXISTS', tag .. ':environments', environment) == 0 then return false end
if digest ~= '' then
  local found = call('HMGET', tag .. ':phase', request_id, single_flight.key(environment, digest))
  if found[1] or found[2] then return false end
end
counters.submitted(environment, 1, 0)
counters.read({'minute', 'affinity:' .. environment})
-- Leave one call a minute to submit, which then notes the totals.
if now >= (counters.before('minute') + 1) * 60000 then return false end

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
if affinity ~= '' then counters.note_affinity(environment) end
counters.write()
notify(environment, 1)
return 1
