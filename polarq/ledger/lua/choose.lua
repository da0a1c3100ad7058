-- In front of the scripts that choose among what waits: which rollouts a node may take now, in the order in which they
-- shall start. `index` is the name of any shared key, `node` says what a node is (`Place` in admission.py).
local LONGEST_LOOK = 512 -- rollouts of one run looked at in one step; its own doorbell reaches what lies behind

local function task_of(id)
  return string.match(id, '^(.*)%.%d+$')
end

local function task_key(index, id)
  return beside(index, '{' .. task_of(id) .. '}:task')
end

local function rollout_key(index, id)
  return beside(index, '{' .. task_of(id) .. '}:rollout:' .. string.match(id, '(%d+)$'))
end

local function held_back(index, node_id)
  local flags = redis.call('HMGET', beside(index, 'node-flags:' .. node_id), 'draining', 'paused')
  return flags[1] or flags[2]
end

local function takes_work(index, node_id)
  return redis.call('EXISTS', beside(index, 'node-alive:' .. node_id)) == 1 and not held_back(index, node_id)
end

-- Whether a node may run a task's rollouts. What is not known of the node is not held against it.
local function fits(index, node, task)
  local t = redis.call('HMGET', task, 'pin', 'labels', 'wants_model', 'backend', 'home')
  if t[1] and t[1] ~= node.id then return false end
  if t[2] then
    for key, value in pairs(cjson.decode(t[2])) do
      if node.labels[key] ~= value then return false end
    end
  end
  if t[3] and node.model ~= '' and t[3] ~= node.model then return false end
  if t[4] == '' then
    if node.default_runtime == false then return false end
  elseif t[4] and next(node.runtimes) and not node.runtimes[t[4]] then
    return false
  end
  -- A group that shall be together follows its first rollout for as long as that one's node takes work.
  return not t[5] or t[5] == node.id or not takes_work(index, t[5])
end

-- How many more rollouts of a run may be claimed now, and what of the fleet it has for its weight.
local function room(index, node, run)
  if redis.call('SISMEMBER', beside(index, 'runs-paused'), run) == 1 then return 0, 0 end
  local held = redis.call('SCARD', beside(index, 'run-held:' .. run))
  local most = node.most[run]
  return most and math.max(0, most - held) or math.huge, held / (node.weights[run] or 1)
end

-- At most `wanted` rollouts that fit. Runs with less in flight for their weight come first, and each one taken counts.
local function choose(index, node, wanted)
  local lines, chosen, fit = {}, {}, {}
  for _, run in ipairs(redis.call('SMEMBERS', beside(index, 'runs-waiting'))) do
    local left, share = room(index, node, run)
    local line = {run = run, left = left, share = share, at = 0, ids = {}, seen = 0}
    if left > 0 then lines[#lines + 1] = line end
  end
  local function next_of(line)
    while line.left > 0 do
      line.at = line.at + 2
      if line.at > #line.ids then
        if line.seen >= LONGEST_LOOK then break end
        local first = line.seen
        line.seen = first == 0 and math.min(wanted + 7, LONGEST_LOOK) or LONGEST_LOOK
        line.ids = redis.call('ZRANGE', beside(index, 'run-waiting:' .. line.run), first, line.seen - 1, 'WITHSCORES')
        line.at = 2
        if #line.ids == 0 then break end
      end
      local id = line.ids[line.at - 1]
      local task = task_key(index, id)
      if fit[task] == nil then fit[task] = fits(index, node, task) end
      if redis.call('HGET', rollout_key(index, id), 'state') ~= 'queued' then
        -- Whatever put it here: it must not stand in the way of what waits.
        redis.call('ZREM', beside(index, 'run-waiting:' .. line.run), id)
        redis.call('ZREM', beside(index, 'waiting'), id)
      elseif fit[task] then
        line.id, line.since = id, tonumber(line.ids[line.at])
        return true
      end
    end
    line.id = nil
    return false
  end
  local waiting = {}
  for _, line in ipairs(lines) do
    if next_of(line) then waiting[#waiting + 1] = line end
  end
  while #waiting > 0 and #chosen < wanted do
    local best = 1
    for i = 2, #waiting do
      local a, b = waiting[i], waiting[best]
      if a.share < b.share or (a.share == b.share and (a.since < b.since or (a.since == b.since and a.run < b.run))) then
        best = i
      end
    end
    local line = waiting[best]
    chosen[#chosen + 1] = line.id
    line.left = line.left - 1
    line.share = line.share + 1 / (node.weights[line.run] or 1)
    if not next_of(line) then table.remove(waiting, best) end
  end
  return chosen
end
