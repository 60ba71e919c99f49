-- Commands over lists of any length; Lua's unpack ends near 8,000 values.
local bulk = {}

-- Calls one command with all the values, after the key if there is one. Joins the answers of a command that
-- answers with lists.
function bulk.call(command, key, values)
  if #values == 0 then return {} end
  if #values <= 4000 then
    if key then return redis.call(command, key, unpack(values)) end
    return redis.call(command, unpack(values))
  end
  local all = {}
  for i = 1, #values, 4000 do
    local part = bulk.call(command, key, {unpack(values, i, math.min(i + 3999, #values))})
    for _, item in ipairs(type(part) == 'table' and part or {}) do all[#all + 1] = item end
  end
  return all
end

-- Returns how many of these keys exist.
function bulk.existing(names)
  local n = 0
  for i = 1, #names, 4000 do
    n = n + redis.call('EXISTS', unpack(names, i, math.min(i + 3999, #names)))
  end
  return n
end

-- Returns for each key whether it exists. It asks about all at once, since mostly all exist, or none, or
-- only the first.
function bulk.filled(names)
  local full, left = {}, bulk.existing(names)
  local all = left == #names
  for i, name in ipairs(names) do
    full[i] = all or left > 0 and redis.call('EXISTS', name) == 1
    if full[i] then left = left - 1 end
  end
  return full
end
