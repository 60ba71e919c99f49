-- Wakes up to `count` idle workers of an environment. No more than 16 tokens lie ready: a worker that
-- leaves requests waiting wakes one more worker. `request`: the id of the one request that waits, a zero byte
-- and its record, unless that is large; so the worker can begin with it while it claims.
local function notify(environment, count, request)
  local wakeup = tag .. ':wakeup:' .. environment
  if request and #request > LARGE_BYTES then request = nil end
  local missing = math.min(count, 16) - redis.call('LLEN', wakeup)
  for _ = 1, missing do redis.call('RPUSH', wakeup, request or '1') end
end
