#!lua flags=allow-oom
-- parts: clock publish counters wait_list requeue grace history account hot
-- renew: a heartbeat, which extends the worker's lease over all its work. `idle_lease_ms`: the lease of a
-- worker that holds nothing. `tallies`: the worker's counts since the last heartbeat. `used`: see account.lua.
-- `headers`: see hot.lua.
-- Answers:
--   `held`: size of the processing list. `expired`: 1 if some worker's lease has expired.
--   `timed_out`: requests taken away because they ran longer than they may.
--   `known`: 1 if the fleet knows this worker. `workers`: how many there are.
--   `waiting`: how many requests wait in its environments, without those where nothing may start.
note_minute()
write_account()
hot.note(headers)
local processing, workers = tag .. ':processing:' .. worker, tag .. ':workers'
-- A worker that renews is not overdue, however late it comes.
redis.call('ZADD', workers, now + lease_ms, worker)
local judged = now >= grace_ends()
local timed_out = judged and redis.call('ZRANGEBYSCORE', processing, '-inf', now, 'LIMIT', 0, 100) or {}
for i, request_id in ipairs(timed_out) do
  -- The next renewal takes the rest.
  if requeue.is_full() then timed_out = {unpack(timed_out, 1, i - 1)} break end
  requeue.run(request_id, 'retry', 'overran')
  redis.call('ZREM', processing, request_id)
end
counters.add('reaped', #timed_out)
for i, name in ipairs(tallies.name) do counters.add(name, tallies.n[i]) end
publish.all()
counters.write()
local expired = judged and redis.call('ZRANGEBYSCORE', workers, '-inf', now, 'LIMIT', 0, 1) or {}
local held = redis.call('ZCARD', processing)
redis.call('ZADD', workers, now + (held > 0 and lease_ms or idle_lease_ms), worker)
local waiting, paused = 0, redis.call('EXISTS', tag .. ':paused') == 1
for _, environment in ipairs(environments) do
  -- The lists of paused tenants are in no ring.
  if not paused or (not wait_list.is_paused('e', environment) and wait_list.any(environment)) then
    waiting = waiting + tonumber(redis.call('HGET', tag .. ':stats', 'waiting:' .. environment) or 0)
  end
end
return answer({held = held, expired = #expired, timed_out = timed_out, waiting = waiting,
  known = redis.call('HEXISTS', tag .. ':info', worker), workers = redis.call('ZCARD', workers)})
