-- each call: now = clock_ms()
-- Returns the server's time, in ms since 1970.
local now
local function clock_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
