// SPDX-License-Identifier: MIT
/*
 * Other processes: fork, descriptors passed on, exec, shared address spaces without shared threads, and the ways in which a
 * process ends.
 */
#include "guest.h"

#define SIZE	(4 * GPU_PAGE)

struct shared {
	int fd;
	uint64_t handle;
	uint8_t *at;
};

static int client(void)
{
	int fd = open("/dev/nvp2p_client", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		bail("/dev/nvp2p_client: %s", strerror(errno));
	return fd;
}

/* What everyone but the opener gets; a bit for each answer that is wrong. */
static int try_all(void *argument)
{
	struct shared *shared = argument;
	struct gdrdrv_get_version version;
	uint64_t handle;
	int wrong = 0;

	wrong |= (request(shared->fd, GDRDRV_IOC_GET_VERSION, &version) != -EACCES) << 0;
	wrong |= (pin(shared->fd, BAR_VA, 1, &handle) != -EACCES) << 1;
	wrong |= (unpin(shared->fd, shared->handle) != -EACCES) << 2;
	wrong |= (mapping_type(shared->fd, shared->handle) != -EACCES) << 3;
	wrong |= (cb_flag(shared->fd, shared->handle) != -EACCES) << 4;
	wrong |= (map(shared->fd, shared->handle, SIZE) != MAP_FAILED || errno != EACCES) << 5;
	return wrong;
}

static int touch(void *argument)
{
	uint8_t value;

	return load_byte(((struct shared *)argument)->at, &value);
}

static int do_nothing(void *argument)
{
	(void)argument;
	return 0;
}

static struct shared set_up(void)
{
	struct shared shared = { .fd = gdr_open() };

	shared.handle = must_pin(shared.fd, BAR_VA, SIZE);
	shared.at = must_map(shared.fd, shared.handle, SIZE);
	store_byte(shared.at, 77);
	return shared;
}

static void tear_down(struct shared *shared)
{
	munmap(shared->at, SIZE);
	close(shared->fd);
}

static void forked(void)
{
	struct shared shared = set_up();
	uint8_t value = 0;

	equal(in_child(try_all, &shared), 0, "fork: every request of the child is refused with EACCES");
	equal(WEXITSTATUS(in_child(touch, &shared)), SIGSEGV, "fork: the child has no mapping");
	equal(in_child(do_nothing, NULL), 0, "fork: a child ends");
	ok(!load_byte(shared.at, &value) && value == 77, "fork: the parent's mapping is as it was");
	equal(mapping_type(shared.fd, shared.handle), GDRDRV_MAPPING_WC, "fork: and its pin");
	tear_down(&shared);
}

static void send_fd(int socket, int fd)
{
	char control[CMSG_SPACE(sizeof(int))] = { }, byte = 0;
	struct iovec data = { &byte, 1 };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &fd, sizeof(int));
	if (sendmsg(socket, &message, 0) != 1)
		bail("sendmsg: %s", strerror(errno));
}

static int receive_fd(int socket)
{
	char control[CMSG_SPACE(sizeof(int))], byte;
	struct iovec data = { &byte, 1 };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	int fd;

	if (recvmsg(socket, &message, 0) != 1 || !CMSG_FIRSTHDR(&message))
		return -1;
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
	return fd;
}

static void passed_on(void)
{
	struct shared shared;
	int sockets[2];
	pid_t pid;
	int status;

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets))
		bail("socketpair: %s", strerror(errno));
	pid = fork();
	if (!pid) {
		struct shared theirs = { .fd = receive_fd(sockets[1]), .handle = 1 };

		_exit(theirs.fd < 0 ? 255 : try_all(&theirs));
	}
	shared = set_up();
	send_fd(sockets[0], shared.fd);
	waitpid(pid, &status, 0);
	equal(status, 0, "SCM_RIGHTS: every request of the receiver is refused with EACCES");
	ok(reachable(shared.at), "SCM_RIGHTS: the sender's mapping is as it was");
	tear_down(&shared);
	close(sockets[0]);
	close(sockets[1]);
}

/* --- exec: the same process by number, but not the address space of the opener ------------------------------------- */

static int exec_self(void *argument)
{
	struct shared *shared = argument;
	char number[16];
	int fd = gdr_open(), keep;

	shared->handle = must_pin(fd, BAR_VA, SIZE);
	keep = dup(fd);		/* without close-on-exec */
	snprintf(number, sizeof(number), "%d", keep);
	execl("/proc/self/exe", "after-exec", number, NULL);
	return 254;
}

static int after_exec(const char *number)
{
	struct shared shared = { .fd = atoi(number), .handle = 1 };

	return try_all(&shared);
}

static void executed(void)
{
	struct shared shared = { };

	equal(in_child(exec_self, &shared), 0, "exec: every request on a descriptor from before is refused with EACCES");
	equal(knob("live"), 0, "exec: the end of the process gives the pages back");
}

/* --- clone ---------------------------------------------------------------------------------------------------------- */

static int shares_memory(void *argument)
{
	struct shared *shared = argument;

	/* The address space is the opener's, so its mapping works; requests are another process's. */
	return try_all(shared) | !reachable(shared->at) << 6;
}

static void cloned(void)
{
	static char stack[1 << 16] __attribute__((aligned(16)));
	struct shared shared = set_up();
	pid_t pid = clone(shares_memory, stack + sizeof(stack), CLONE_VM | SIGCHLD, &shared);
	int status = -1;

	if (pid < 0)
		bail("clone: %s", strerror(errno));
	waitpid(pid, &status, 0);
	equal(status, 0, "CLONE_VM: requests are refused with EACCES, the mapping is the opener's");
	tear_down(&shared);
}

static void *thread_body(void *argument)
{
	struct shared *shared = argument;
	uint64_t handle;

	return (void *)(long)(pin(shared->fd, BAR_VA, 1, &handle) || unpin(shared->fd, shared->handle));
}

static void threads(void)
{
	struct shared shared = set_up();
	pthread_t thread;
	void *result;

	pthread_create(&thread, NULL, thread_body, &shared);
	pthread_join(thread, &result);
	ok(!result, "a thread of the opener may do all");
	ok(!reachable(shared.at), "and does it for all");
	tear_down(&shared);
}

/* --- the last descriptor in another process -------------------------------------------------------------------------- */

static int sleep_until_told(void *argument)
{
	char byte;

	return read(*(int *)argument, &byte, 1) != 1;
}

/* The opener closes, but a child still has the descriptor and drops it last. */
static void last_reference_elsewhere(bool persistent)
{
	int gates[2], gpu = client(), users = module_users(), status;
	const char *mode = persistent ? "persistent" : "not persistent";
	long callbacks = knob("callbacks");
	struct shared shared;
	pid_t pid;

	if (pipe(gates))
		bail("pipe: %s", strerror(errno));
	shared = set_up();
	pid = fork();
	if (!pid)
		_exit(sleep_until_told(&gates[0]));
	tear_down(&shared);
	equal(knob("live"), 1, "%s: pinned while a child has the descriptor", mode);
	if (write(gates[1], "", 1) != 1)
		bail("write: %s", strerror(errno));
	waitpid(pid, &status, 0);
	equal(status, 0, "%s: the child drops it", mode);

	if (persistent) {
		equal(knob("live"), 0, "%s: the pages are given back from there", mode);
	} else {
		equal(knob("live"), 1, "%s: the pages stay with the driver, which would not take them from there", mode);
		ok(module_users() > users, "%s: the callback holds the module", mode);
		ok(!reachable(shared.at), "%s: nothing is mapped", mode);
		free_gpu(BAR_VA, SIZE);
		equal(knob("callbacks"), callbacks + 1, "%s: the callback comes", mode);
		equal(knob("live"), 0, "%s: the driver has its page table back", mode);
	}
	equal(module_users(), users, "%s: nothing holds the module", mode);
	close(gpu);
	close(gates[0]);
	close(gates[1]);
}

/* --- the ends of a process -------------------------------------------------------------------------------------------- */

/* Which descriptor is closed first decides whether the callback comes before our release. */
static int ends_with_pins(void *gpu_first)
{
	int gpu = -1, fd;
	uint8_t *at;

	if (gpu_first)
		gpu = client();
	fd = gdr_open();
	if (!gpu_first)
		gpu = client();
	must_pin(fd, BAR_VA + 8 * GPU_PAGE, SIZE);
	at = must_map(fd, must_pin(fd, BAR_VA, SIZE), SIZE);
	store_byte(at, 1);
	return gpu < 0;
}

static int copies_until_killed(void *argument)
{
	int fd = gdr_open(), gpu = client();
	uint8_t *at = must_map(fd, must_pin(fd, BAR_VA, SIZE), SIZE);

	(void)gpu;
	memset(at, 1, SIZE);
	if (write(*(int *)argument, "", 1) != 1)
		return 1;
	for (;;)
		memset(at, 2, SIZE);
}

static void killed_in_copy(void)
{
	int gates[2], status;
	char byte;
	pid_t pid;

	if (pipe(gates))
		bail("pipe: %s", strerror(errno));
	pid = fork();
	if (!pid)
		_exit(copies_until_killed(&gates[1]));
	if (read(gates[0], &byte, 1) != 1)
		bail("read: %s", strerror(errno));
	kill(pid, SIGKILL);
	waitpid(pid, &status, 0);
	equal(WTERMSIG(status), SIGKILL, "killed in the middle of a copy");
	equal(knob("live"), 0, "its pages are given back");
	close(gates[0]);
	close(gates[1]);
}

static void ends(const char *mode)
{
	equal(in_child(ends_with_pins, NULL), 0, "%s: a process ends, our file closed first", mode);
	equal(knob("live"), 0, "its pages are given back");
	equal(in_child(ends_with_pins, (void *)1), 0, "%s: a process ends, the driver's file closed first", mode);
	equal(knob("live"), 0, "its pages are given back");
	killed_in_copy();
	equal(module_users(), 0, "nothing holds the module");
}

static void everything(bool persistent)
{
	forked();
	passed_on();
	executed();
	cloned();
	threads();
	last_reference_elsewhere(persistent);
	ends(persistent ? "persistent" : "not persistent");
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[0], "after-exec"))
		return after_exec(argv[1]);
	load("");
	everything(true);
	load("use_persistent_mapping=0");
	everything(false);
	return done();
}
