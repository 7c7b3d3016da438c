"""Random requests through the whole loop: whatever a sequence reads through its block table is its own history.

The cache holds, in place of keys, the number of the prefix whose last token was written there. After each step every
sequence of the plan reads its whole row back; each slot must hold the number of that very prefix, and what attention
sees of it, draft trees included, must be the numbers of all prefixes of one text.
"""

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv

HEAD_DIM = 8
# Layers by (head_dim, sliding_window), a group each: the narrower the heads, the larger the blocks.
GROUPS = [
    [(HEAD_DIM, None)],
    [(HEAD_DIM, 3)],
    [(HEAD_DIM, None), (HEAD_DIM, 4)],
    [(2 * HEAD_DIM, 2), (HEAD_DIM, None), (HEAD_DIM, 5)],
]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class StepLoop(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 12),
        budget=st.integers(1, 16),
        in_flight=st.integers(1, 2),
        lookahead=st.sampled_from([0, 0, 3, 5]),
        layers=st.sampled_from(GROUPS),
        host_blocks=st.integers(0, 12),
    )
    def start(self, block_size, num_blocks, budget, in_flight, lookahead, layers, host_blocks):
        groups = [
            pagedkv.GroupSpec([layer], 1, head_dim, sliding_window=window)
            for layer, (head_dim, window) in enumerate(layers)
        ]
        num_blocks *= len(groups)
        cache_config = pagedkv.CacheConfig(num_blocks, block_size, groups=groups, num_host_blocks=host_blocks)
        options = {"max_plans_in_flight": in_flight, "lookahead": lookahead}
        mode = "swap" if host_blocks else "recompute"
        scheduler_config = pagedkv.SchedulerConfig(4, budget, 32, preemption_mode=mode, **options)
        self.lookahead = lookahead
        self.scheduler = pagedkv.Scheduler(cache_config, scheduler_config)
        self.cache = pagedkv.KVCache.from_config(cache_config, scheduler_config, backend="numpy")
        self.prefixes = {}
        self.texts = {}  # (handle, sample) -> tokens, the prompt included
        self.plans = []  # in flight, oldest first: plan, whether it ran, the tokens it sampled
        self.rows = {}  # (handle, sample) -> row, as the last plan with it told
        self.drafts = {}  # (handle, sample) -> ids and parents of guesses
        self.aborted = set()
        self.beams = set()
        self.sessions = set()
        self.ended = set()  # (handle, sample) of sessions that wait for more tokens
        self.num_requests = 0

    @rule(
        prompt=TOKENS,
        max_tokens=st.integers(1, 6),
        n=st.integers(1, 3),
        salt=st.sampled_from([None, "a"]),
        beams=st.booleans(),
        session=st.booleans(),
    )
    def add(self, prompt, max_tokens, n, salt, beams, session):
        self.num_requests += 1
        try:
            handle = self.scheduler.add_request(
                str(self.num_requests),
                prompt,
                max_tokens=max_tokens,
                n=n,
                cache_salt=salt,
                needs_commit=beams,
                session=session and not (beams and n > 1),
            )
        except ValueError:
            return
        if session and not (beams and n > 1):
            self.sessions.add(handle)
        if beams and n > 1:
            self.beams.add(handle)
        self.texts |= {(handle, sample): [("salt", salt), *prompt] for sample in range(n)}

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tree=st.booleans())
    def draft(self, data, tree):
        """Guess for a sequence, if it decodes and no plan in flight is about it."""
        key = data.draw(st.sampled_from(sorted(self.rows)))
        ids = data.draw(st.lists(st.integers(0, 1), max_size=self.lookahead))
        chain = list(range(-1, len(ids) - 1))
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(ids))] if tree else chain
        try:
            self.scheduler.set_draft_tokens([self.rows[key]], [0, len(ids)], ids, parents if tree else None)
        except (pagedkv.exceptions.StateError, pagedkv.exceptions.InvalidArgumentError):
            return
        self.drafts[key] = (ids, parents)

    @rule(run=st.booleans(), data=st.data())
    def plan(self, run, data):
        try:
            plan = self.scheduler.schedule()
        except pagedkv.exceptions.StateError:
            return
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=plan.num_samples, max_size=plan.num_samples))
        self.plans.append([plan, False, tokens])
        self.leave_rows(plan.preempted + plan.finished + plan.new)
        self.rows |= dict(zip(self.keys(plan), plan.rows.tolist(), strict=True))
        if run:
            self.run_plans()

    def leave_rows(self, changes):
        left = {row for row, _, _ in changes}
        self.rows = {key: row for key, row in self.rows.items() if row not in left}

    @staticmethod
    def keys(plan):
        return list(zip(plan.handles.tolist(), plan.sequence.tolist(), strict=True))

    @staticmethod
    def num_drafts(plan, i):
        """Return how many guesses sequence i of the plan runs: a sample is drawn after each."""
        rows = plan.sample_rows[plan.sample_start_loc[i] : plan.sample_start_loc[i + 1]]
        return len(set(rows.tolist())) - 1 if len(rows) else 0

    @staticmethod
    def path(parents, node):
        return [] if node < 0 else [*StepLoop.path(parents, parents[node]), node]

    def run_plans(self):
        """Run the plans in flight, in order, as a device would."""
        for record in self.plans:
            plan, has_run, _ = record
            if not has_run:
                self.cache.apply(plan)
                self.write_and_read(plan)
                record[1] = True

    def write_and_read(self, plan):
        sampled = self.sampled_in_flight(plan)
        histories, paths = [], []
        for i, key in enumerate(self.keys(plan)):
            text = self.texts[key] + sampled.get(key, [])
            num_drafts, num_known = self.num_drafts(plan, i), plan.seq_lens[i] - self.num_drafts(plan, i)
            known = [self.number(tuple(text[: end + 2])) for end in range(num_known)]
            history = list(known)
            first = num_known - (plan.query_start_loc[i + 1] - plan.query_start_loc[i] - num_drafts)
            paths += [known[: end + 1] for end in range(first, num_known)]
            for node in range(num_drafts):
                ids, parents = self.drafts[key]
                path = self.path(parents, node)
                guesses = [ids[guess] for guess in path]
                history.append(self.number((*text[: num_known + 1], *guesses)))
                paths.append(known + [history[num_known + guess] for guess in path])
            histories.append(history)
        new = [
            number
            for i, history in enumerate(histories)
            for number in history[len(history) - (plan.query_start_loc[i + 1] - plan.query_start_loc[i]) :]
        ]
        new_lens = np.diff(plan.query_start_loc)
        for number, group in enumerate(self.cache.groups):
            values = np.repeat(np.array(new, np.float32)[:, None, None], group.head_dim, axis=2)
            self.cache.append_kv(group.layers[0], values, values, plan.slot_mapping[number])
            k_cache, v_cache = self.cache.layer(group.layers[0])
            size = group.block_size
            for row, history, num_new in zip(plan.rows, histories, new_lens.tolist(), strict=True):
                table = self.cache.block_table[number, row]
                first = max(0, len(history) - num_new + 1 - (group.sliding_window or len(history) + 1))
                positions = np.arange(first, len(history))
                assert k_cache[table[positions // size], 0, positions % size, 0].tolist() == history[first:]
                assert v_cache[table[positions // size], 0, positions % size, -1].tolist() == history[first:]
            if group.sliding_window is None:
                self.attend(plan, number, group, paths)

    def attend(self, plan, number, group, paths):
        """With queries of 0 each token gets the mean of the numbers that it sees."""
        if plan.num_tokens == 0:
            return
        k_cache, v_cache = self.cache.layer(group.layers[0])
        q = np.zeros((plan.num_tokens, 1, group.head_dim), np.float32)
        batch = (self.cache.block_table[number], plan.seq_lens, plan.query_start_loc, plan.rows)
        masks = {"tree_mask": plan.tree_mask, "tree_mask_start_loc": plan.tree_mask_start_loc}
        out = pagedkv.paged_attention(q, k_cache, v_cache, *batch, **masks)
        np.testing.assert_allclose(out[:, 0, 0], [np.mean(path) for path in paths], rtol=1e-5)

    def sampled_in_flight(self, until):
        """Tokens that plans in flight before `until` sampled, by (handle, sample)."""
        sampled = {}
        for plan, _, tokens in self.plans:
            if plan is until:
                return sampled
            for key, drawn in self.drawn(plan, tokens):
                sampled.setdefault(key, []).append(drawn)
        raise AssertionError("the plan is in flight")

    def drawn(self, plan, tokens):
        for i, handle in enumerate(plan.handles.tolist()):
            first, end = plan.sample_start_loc[i], plan.sample_start_loc[i + 1]
            if end - first == 1:
                yield (handle, plan.sequence[i].item()), tokens[first]

    def number(self, prefix):
        return self.prefixes.setdefault(prefix, len(self.prefixes) + 1)

    @rule(ok=st.sampled_from([True, True, True, False]))
    def end_transfers(self, ok):
        ended = self.cache.finished_transfers(self.scheduler.outstanding_transfers)
        self.scheduler.transfers_done(ended, ok)

    @precondition(lambda self: self.plans)
    @rule(seed=st.integers(0, 99))
    def commit(self, seed=0):
        self.run_plans()
        plan, _, tokens = self.plans.pop(0)
        drawn_for = np.repeat(plan.handles, np.diff(plan.sample_start_loc)).tolist()
        if any(self.num_drafts(plan, i) for i in range(plan.num_sequences)):
            self.commit_drafts(plan, tokens, random.Random(seed))
            return
        if not self.beams.isdisjoint(drawn_for):
            self.commit_beams(plan, tokens, drawn_for, random.Random(seed))
            return
        result = self.scheduler.commit(plan, tokens)
        got = iter(zip(result.handles.tolist(), result.sequence.tolist(), strict=True))
        kept = [token for handle, token in zip(drawn_for, tokens, strict=True) if handle not in self.aborted]
        assert result.num_ignored == len(tokens) - len(kept)
        for key, token, reason in zip(got, kept, result.finish_reason.tolist(), strict=True):
            self.texts[key].append(token)
            self.drafts.pop(key, None)
            self.note_end(key, reason)

    def commit_drafts(self, plan, drawn, chance):
        """Accept some guesses of each sequence."""
        rows, paths, told = [], [], []
        for i, key in enumerate(self.keys(plan)):
            num_drafts = self.num_drafts(plan, i)
            if num_drafts == 0:
                own = drawn[plan.sample_start_loc[i] : plan.sample_start_loc[i + 1]]
                rows += [[token] for token in own]
                paths += [[] for _ in own]
                told += [key[0]] * len(own)
                continue
            ids, parents = self.drafts[key]
            path = self.path(parents, chance.randint(-1, num_drafts - 1))
            rows.append([*(ids[guess] for guess in path), chance.randint(0, 1)])
            paths.append(path)
            told.append(key[0])
        width = max(map(len, rows))
        padded = [np.array([row + [-1] * (width - len(row)) for row in part]) for part in (rows, paths)]
        result = self.scheduler.commit(plan, padded[0], accepted=padded[1])
        kept = [row for handle, row in zip(told, rows, strict=True) if handle not in self.aborted]
        arrays = (result.handles, result.sequence, result.num_new_tokens, result.finish_reason)
        got = zip(*(array.tolist() for array in arrays), strict=True)
        for (handle, sample, num_new, reason), row in zip(got, kept, strict=True):
            self.texts[handle, sample] += row[:num_new]
            self.drafts.pop((handle, sample), None)
            self.note_end((handle, sample), reason)

    def note_end(self, key, reason):
        if reason and key[0] in self.sessions:
            self.ended.add(key)
            self.rows.pop(key, None)

    def commit_beams(self, plan, drawn, drawn_for, chance):
        """Let some beams go and others branch; requests that are none get their one token per sample."""
        numbers = np.repeat(plan.sequence, np.diff(plan.sample_start_loc)).tolist()
        starts = {handle: drawn_for.index(handle) for handle in drawn_for}
        counts = {handle: drawn_for.count(handle) for handle in drawn_for}
        is_prompt = {
            handle: numbers[starts[handle]] == numbers[starts[handle] + counts[handle] - 1] for handle in starts
        }
        parents = list(range(len(drawn_for)))
        for handle in self.beams & set(drawn_for):
            mine = range(starts[handle], starts[handle] + counts[handle])
            parents = [parent for parent in parents if parent not in mine]
            parents += chance.choices(mine, k=chance.randint(1, self.num_beams(handle)))
        # A later plan may have run with the tokens of requests that are no beams.
        is_beam = [drawn_for[parent] in self.beams for parent in parents]
        tokens = [chance.randint(0, 1) if beam else drawn[i] for i, beam in zip(parents, is_beam, strict=True)]
        before = dict(self.texts)
        result = self.scheduler.commit(plan, tokens, parents=parents)
        assert result.num_ignored == sum(drawn_for[parent] in self.aborted for parent in parents)
        arrays = (result.handles, result.sequence, result.finish_reason)
        told = zip(*(array.tolist() for array in arrays), strict=True)
        for parent, token in zip(parents, tokens, strict=True):
            handle = drawn_for[parent]
            if handle in self.aborted:
                continue
            got, sample, reason = next(told)
            assert got == handle
            self.note_end((handle, sample), reason)
            source = 0 if is_prompt[handle] and counts[handle] > 1 else numbers[parent]
            if sample >= 0:
                self.texts[handle, sample] = [*before[handle, source], token]

    def num_beams(self, handle):
        return sum(key[0] == handle for key in self.texts)

    @precondition(lambda self: self.plans)
    @rule(index=st.integers(0, 1))
    def rollback(self, index):
        index = min(index, len(self.plans) - 1)
        self.scheduler.rollback(self.plans[index][0])
        for plan, _, _ in self.plans[index:]:
            self.leave_rows(plan.new)
        del self.plans[index:]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def abort(self, data):
        handle, _ = data.draw(st.sampled_from(sorted(self.texts)))
        self.scheduler.abort(handle)
        self.aborted.add(handle)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), max_size=4), max_tokens=st.integers(1, 4))
    def append_tokens(self, data, ids, max_tokens):
        key = data.draw(st.sampled_from(sorted(self.ended)))
        try:
            self.scheduler.append_tokens(*key, ids, max_tokens=max_tokens)
        except (ValueError, pagedkv.exceptions.StateError, pagedkv.exceptions.UnknownIdError):
            return
        self.texts[key] += ids
        self.ended.discard(key)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def free(self, data):
        handle, sample = data.draw(st.sampled_from(sorted(self.ended)))
        if handle not in self.aborted:
            self.scheduler.free(handle, sample)
        self.ended.discard((handle, sample))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), hold=st.booleans())
    def hold_or_release(self, data, hold):
        handle, _ = data.draw(st.sampled_from(sorted(self.texts)))
        self.set_held(handle, hold)

    def set_held(self, handle, hold):
        try:
            (self.scheduler.hold if hold else self.scheduler.release)(handle)
        except pagedkv.exceptions.UnknownIdError:
            assert handle not in {key[0] for key in self.ended} or handle in self.aborted

    @rule(
        budget=st.none() | st.integers(1, 16),
        seats=st.none() | st.integers(1, 4),
        watermark=st.none() | st.sampled_from([0.0, 0.5, 0.95]),
        partial=st.none() | st.integers(1, 3),
    )
    def update_limits(self, budget, seats, watermark, partial):
        try:
            self.scheduler.update_limits(
                max_num_batched_tokens=budget, max_num_seqs=seats, watermark=watermark, max_num_partial_prefills=partial
            )
        except pagedkv.exceptions.InvalidArgumentError:
            return

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), max_size=3), n=st.integers(1, 2))
    def fork(self, data, ids, n):
        key = data.draw(st.sampled_from(sorted(self.texts)))
        self.num_requests += 1
        try:
            forked = self.scheduler.fork(*key, str(self.num_requests), ids, max_tokens=2, n=n)
        except (ValueError, pagedkv.exceptions.StateError, pagedkv.exceptions.UnknownIdError):
            return
        self.texts |= {(forked, sample): [*self.texts[key], *ids] for sample in range(n)}

    @invariant()
    def laws_hold(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(1000):
            while self.plans:
                self.commit()
            self.end_transfers(True)
            for handle in {key[0] for key in self.texts}:
                self.set_held(handle, False)
            for key in sorted(self.ended):
                if key[0] not in self.aborted:
                    self.scheduler.free(*key)
            self.ended.clear()
            if not self.scheduler.has_unfinished_requests():
                break
            plan = self.scheduler.schedule()
            self.plans.append([plan, False, [0] * plan.num_samples])
        assert not self.scheduler.has_unfinished_requests()
        assert self.scheduler.usage == 0.0
        assert len(set(self.scheduler.num_host_blocks)) == 1


TestStepLoop = StepLoop.TestCase
TestStepLoop.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
