-- In front of the scripts that notice that a rollout's worker was lost. How that went is kept with the rollout, the
-- newest losses; and how far they are held against it (see `polarq.ledger.blame`), by their signature: what became of
-- the worker ('died', or 'hung': it lives and did not renew), at which stage, and how, as far as known.
local KEPT_LOSSES = 20

local function cause_of(index, node, incarnation, dead)
  local there = redis.call('GET', beside(index, 'node-alive:' .. node))
  if dead or (there and incarnation ~= '' and there ~= incarnation) then return 'worker_gone' end
  return there and 'lease_expired' or 'node_gone'
end

-- What is held against a rollout under signatures that fit this one: what is not known of a loss is not held to differ.
local function against(of, how)
  local most = 0
  for known, sum in pairs(of) do
    if known ~= '' and (how == '' or known == how) then most = math.max(most, sum) end
  end
  return (of[''] or 0) + most
end

-- `beside`: rollouts lost with it; `share`: how much of the loss is held against it, 0 to 1. Returns how often it was
-- lost, what is held against it under this signature, and the losses kept.
local function note_loss(rollout, node, stage, attempt, cause, now, beside, share, how)
  local r = redis.call('HMGET', rollout, 'losses', 'blame')
  local kept, blame = cjson.decode(r[1] or '[]'), cjson.decode(r[2] or '{}')
  if #kept == KEPT_LOSSES then table.remove(kept, 1) end
  kept[#kept + 1] = {node = node or '', stage = stage, attempt = tonumber(attempt), cause = cause, at_ms = now,
    beside = beside, share = share, how = how}
  local kind = (cause == 'lease_expired' and 'hung ' or 'died ') .. stage
  local of = blame[kind] or {}
  of[how] = (of[how] or 0) + share
  blame[kind] = of
  redis.call('HSET', rollout, 'losses', cjson.encode(kept), 'blame', cjson.encode(blame))
  return redis.call('HINCRBY', rollout, 'lost', 1), against(of, how), kept
end
