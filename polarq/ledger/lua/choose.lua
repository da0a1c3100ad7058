-- In front of the scripts that choose among what waits: which rollouts a node may take now, in the order in which they
-- shall start. `index` is the name of any shared key, `node` says what a node is (`Place` in admission.py).
-- Rollouts of one run that a claim looks at. What lies behind many that the node cannot run, a deeper look finds, and
-- rings the node for it by name.
local LONGEST_LOOK = 128

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

-- Whether a node may run what stands in line as `id`, and whether it still waits.
local function stands(index, node, id, fit)
  local task = task_key(index, id)
  if fit[task] == nil then fit[task] = fits(index, node, task) end
  if not fit[task] then return false, true end
  return true, redis.call('HGET', rollout_key(index, id), 'state') == 'queued'
end

-- The first of a run's line, from where the last look left off, that the node may run: into `line.id` and `line.since`.
local function step(index, node, line, wanted, fit, deep)
  line.id = nil
  while line.left > 0 do
    line.at = line.at + 2
    if line.at > #line.ids then
      if line.seen >= deep then return end
      local first = line.seen
      line.seen = math.min(first == 0 and wanted + 7 or math.max(4 * first, LONGEST_LOOK), deep)
      line.ids = redis.call('ZRANGE', beside(index, 'run-waiting:' .. line.run), first, line.seen - 1, 'WITHSCORES')
      line.at = 2
      if #line.ids == 0 then return end
    end
    local id = line.ids[line.at - 1]
    -- A record that somebody damaged is passed over: it must not hold up a fleet.
    local sound, can, waits = pcall(stands, index, node, id, fit)
    if sound and can and waits then
      line.id, line.since = id, tonumber(line.ids[line.at])
      return
    end
    if sound and not waits then
      -- Whatever put it here: it must not stand in the way of what waits.
      redis.call('ZREM', beside(index, 'run-waiting:' .. line.run), id)
      redis.call('ZREM', beside(index, 'waiting'), id)
    end
  end
end

-- At most `wanted` rollouts that fit. Runs with less in flight for their weight come first, and each one taken counts.
-- Lines are looked into only as far as it takes to tell whose turn it is.
local function choose(index, node, wanted, deep)
  local lines, chosen, fit = {}, {}, {}
  for _, run in ipairs(redis.call('SMEMBERS', beside(index, 'runs-waiting'))) do
    local left, share = room(index, node, run)
    if left > 0 then lines[#lines + 1] = {run = run, left = left, share = share, at = 0, ids = {}, seen = 0} end
  end
  while #chosen < wanted do
    local least
    for _, line in ipairs(lines) do
      if not line.over and (not least or line.share < least) then least = line.share end
    end
    if not least then break end
    local best
    for _, line in ipairs(lines) do
      if not line.over and line.share == least then
        if not line.id then step(index, node, line, wanted, fit, deep) end
        if not line.id then
          line.over = true
        elseif not best or line.since < best.since or (line.since == best.since and line.run < best.run) then
          best = line
        end
      end
    end
    if best then
      chosen[#chosen + 1] = best.id
      best.id, best.left = nil, best.left - 1
      best.share = best.share + 1 / (node.weights[best.run] or 1)
    end
  end
  return chosen
end
