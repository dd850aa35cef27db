"""What must be true of a router before two servers."""

import concurrent.futures
import time

import traffic
from routers import metric
from traffic import Broken

# Prefixes long enough for several blocks, that no other one begins with.
TOPICS = ["lighthouses", "beekeeping", "glaciers", "typewriters", "volcanoes", "violins", "deserts", "canals"]
ROUTER_READY_WITHIN_S = 180
# A router that sends eight new prefixes at once to one server may do so by chance.
ROUNDS = 4
# Until a router that finds a server dead may have failed to answer at all.
FAILOVER_WITHIN_S = 30


def prompt(topic, end=""):
    facts = [f"Fact {number} about {topic}: it took {number * 7 + len(topic)} years to be understood."
             for number in range(1, 9)]
    return f"Everything there is to know about {topic}. " + " ".join(facts) + end


def wait(router, model):
    """Until the router answers a chat."""
    deadline = time.monotonic() + ROUTER_READY_WITHIN_S
    while True:
        try:
            return traffic.whole_chat(router.url, model, "Hello")
        except Broken as error:
            ended = [process for process in router.processes if process.child.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise Broken(f"not ready ({error}):\n{(ended or router.processes)[0].told()}") from error
            time.sleep(0.3)


class Served:
    """Which server has finished how many more prompts."""

    def __init__(self, servers):
        self.servers = servers
        self.before = [server.prompts() for server in servers]

    def more(self):
        return [server.prompts() - before for server, before in zip(self.servers, self.before)]

    def by(self, count):
        """The server that finished all of `count` prompts; a counter may come a moment later."""
        for _ in range(50):
            more = self.more()
            if sum(more) >= count:
                break
            time.sleep(0.05)
        who = [server for server, prompts in zip(self.servers, more) if prompts == count]
        if sum(more) != count or len(who) != 1:
            raise Broken(f"{count} prompts were finished as {more}")
        return who[0]


def streams(router, model):
    """Chats and completions, whole and streamed, several at once."""
    jobs = [(kind, f"Say something about {topic}.") for topic in TOPICS
            for kind in (traffic.chat, traffic.completion)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: job[0](router.url, model, job[1]), jobs))
    if any(answer.completion_tokens < 1 for answer in answers):
        raise Broken(f"empty answers: {answers}")
    return f"{len(answers)} streams"


def affinity(router, servers, model):
    """The same prefix goes where it went before and is found there; different ones go to both servers."""
    first, rounds = {}, 0
    while len(set(map(id, first.values()))) < len(servers):
        if rounds == ROUNDS:
            raise Broken(f"all of {len(first)} prefixes went to {next(iter(first.values())).name}")
        rounds += 1
        topics = [f"{topic}, volume {rounds}" for topic in TOPICS]
        # At once: a router has no reason to use the other server for one request at a time.
        with concurrent.futures.ThreadPoolExecutor(len(topics)) as pool:
            list(pool.map(lambda topic: traffic.completion(router.url, model, prompt(topic), 48), topics))
        time.sleep(1)  # KV events, and the counters of load that routers ask for
        for turn in range(3):
            for topic in topics:
                served = Served(servers)
                answer = traffic.completion(router.url, model, prompt(topic, f" Question {turn}:"), 4)
                who = served.by(1)
                if first.setdefault(topic, who) is not who:
                    raise Broken(f"{topic} went to {first[topic].name}, then to {who.name}")
                if answer.cached_tokens < answer.prompt_tokens // 2:
                    raise Broken(f"{topic}: {answer.cached_tokens} of {answer.prompt_tokens} tokens cached")
    counts = [sum(who is server for who in first.values()) for server in servers]
    return f"prefixes {counts[0]}+{counts[1]}"


def told_by_events(router, servers, model):
    """A prefix that a server was given past the router is known to the router by the server's events."""
    for turn, server in enumerate([servers[1], servers[0], servers[1], servers[0]]):
        text = prompt(f"what only {server.name} was told, number {turn}")
        traffic.completion(server.url, model, text, 4)
        time.sleep(1)
        served = Served(servers)
        answer = traffic.completion(router.url, model, text + " So?", 4)
        who = served.by(1)
        if who is not server or answer.cached_tokens < answer.prompt_tokens // 2:
            raise Broken(f"told to {server.name}, sent to {who.name}, {answer.cached_tokens} tokens cached")
    return "events 4/4"


def about_all_topics(router, model):
    """Two requests a topic: of some the prefix was at the one server, of the others at the other."""
    for topic in TOPICS:
        traffic.chat(router.url, model, f"After all, {topic}?")
        traffic.completion(router.url, model, prompt(topic), 4)


def failover(router, servers, model):
    """One server is killed under load; streams that it had may break, new requests are answered."""
    killed, left = servers
    broken, whole = 0, 0
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(traffic.completion, router.url, model, prompt(topic, " Go on:"), 200)
                   for topic in TOPICS]
        time.sleep(1)
        killed.kill()
        for stream in running:
            try:
                stream.result()
                whole += 1
            except Broken:
                broken += 1
    start, failed = time.monotonic(), 0
    while True:
        try:
            about_all_topics(router, model)
            break
        except Broken as error:
            failed += 1
            if time.monotonic() - start > FAILOVER_WITHIN_S:
                raise Broken(f"{failed} requests failed after the kill, the last one: {error}") from error
            time.sleep(0.2)
    served = left.prompts()
    for _ in range(2):
        about_all_topics(router, model)
    if left.prompts() - served < 4 * len(TOPICS):
        raise Broken(f"{left.prompts() - served} prompts finished by the server that was left")
    return f"cut {broken} of {broken + whole}, then {failed} failed, {4 * len(TOPICS)} answered"


def index_hits(router, name):
    """The router has found prefixes in its index."""
    hits = metric(router, name)
    if hits < 1:
        raise Broken(f"{name} is {hits}")
    return f"index hits {hits:.0f}"
