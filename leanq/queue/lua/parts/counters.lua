-- parts: bulk
-- Counters of :stats. What a call counts is written once, at its end.
local counters = {added = {}}

function counters.add(name, n) counters.added[name] = (counters.added[name] or 0) + n end

-- Counts requests that ended in an environment; the reason may be ''.
function counters.ended(environment, verdict, reason, n)
  counters.add('f:' .. environment .. ':' .. verdict, n)
  if reason ~= '' then counters.add('c:' .. environment .. ':' .. reason, n) end
end

function counters.write()
  local names, values = {}, {}
  for name, n in pairs(counters.added) do
    if n ~= 0 then names[#names + 1] = name end
  end
  for i, before in ipairs(bulk.call('HMGET', tag .. ':stats', names)) do
    values[2 * i - 1], values[2 * i] = names[i], tonumber(before or 0) + counters.added[names[i]]
  end
  bulk.call('HSET', tag .. ':stats', values)
end
