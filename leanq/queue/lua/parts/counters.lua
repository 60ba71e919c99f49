-- parts: bulk
-- each call: counters.added, counters.known = {}, {}
-- Counters of :stats. A call writes its counts once, at its end. The CPU time (ms) of up to 100 tenants is
-- in u:ENVIRONMENT:TENANT, and the time of all others in u:ENVIRONMENT:. `known`: the values that :stats
-- had in this call, false for a counter that it lacks.
local counters = {MAX_TENANTS = 100}

function counters.add(name, n) counters.added[name] = (counters.added[name] or 0) + n end

-- Reads these counters and all that were added to, in one command.
function counters.read(names)
  for name in pairs(counters.added) do names[#names + 1] = name end
  for i, value in ipairs(bulk.call('HMGET', tag .. ':stats', names)) do counters.known[names[i]] = value end
end

-- Returns the value of a counter before this call. Any process may have written it: text that is no number
-- counts as 0.
function counters.before(name) return tonumber(counters.known[name] or 0) or 0 end

function counters.value(name) return counters.before(name) + (counters.added[name] or 0) end

-- Counts requests that came into an environment: those that wait in a list, and those that joined a run.
function counters.submitted(environment, waiting, joined)
  counters.add('waiting:' .. environment, waiting)
  counters.add('s:' .. environment, waiting + joined)
  counters.add('submitted', waiting + joined)
end

function counters.claimed(environment, n)
  counters.add('claimed', n)
  counters.add('waiting:' .. environment, -n)
end

function counters.picked(environment, n) counters.add('turn:' .. environment, n) end

function counters.found_warm(is_warm) counters.add(is_warm and 'warm_hits' or 'warm_misses', 1) end

-- Counts requests that ended in an environment; the reason may be ''.
function counters.ended(environment, verdict, reason, n)
  counters.add('f:' .. environment .. ':' .. verdict, n)
  if reason ~= '' then counters.add('c:' .. environment .. ':' .. reason, n) end
end

-- Counts n results by how Lean got their prefix; the way may be ''.
function counters.came(way, n)
  if way ~= '' then counters.add('way:' .. way, n) end
end

-- Counts the CPU time (ms) of a result.
function counters.used(environment, tenant, cpu_ms)
  if cpu_ms == 0 then return end
  counters.add('u_ms:' .. environment, cpu_ms)
  counters.add('u:' .. environment .. ':' .. tenant, cpu_ms)
end

function counters.note_affinity(environment) redis.call('HSET', tag .. ':stats', 'affinity:' .. environment, 1) end

function counters.has_affinity(environment) return counters.before('affinity:' .. environment) > 0 end

-- Returns the name under which to count a tenant that was not counted before.
function counters.new_tenant(name)
  if redis.call('HINCRBY', tag .. ':stats', 'tenants', 1) <= counters.MAX_TENANTS then return name end
  redis.call('HINCRBY', tag .. ':stats', 'tenants', -1)
  return string.match(name, '^u:[^:]*:')
end

function counters.write()
  local missing, values = {}, {}
  for name, n in pairs(counters.added) do
    if n ~= 0 and counters.known[name] == nil then missing[#missing + 1] = name end
  end
  for i, value in ipairs(bulk.call('HMGET', tag .. ':stats', missing)) do counters.known[missing[i]] = value end
  for name, n in pairs(counters.added) do
    if n == 0 then
      -- Nothing is to be written.
    elseif not counters.known[name] and string.sub(name, 1, 2) == 'u:' then
      redis.call('HINCRBY', tag .. ':stats', counters.new_tenant(name), n)
    else
      values[#values + 1], values[#values + 2] = name, counters.before(name) + n
    end
  end
  bulk.call('HSET', tag .. ':stats', values)
end
