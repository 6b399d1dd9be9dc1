// SPDX-License-Identifier: MIT
/* The requests: numbers, layouts, every refusal, what each reports. */
#include <stddef.h>

#include "guest.h"

#define AT(type, field, offset) _Static_assert(offsetof(struct type, field) == (offset), #type "." #field)
#define SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type)

SIZE(gdrdrv_pin_buffer, 40);
AT(gdrdrv_pin_buffer, addr, 0);
AT(gdrdrv_pin_buffer, size, 8);
AT(gdrdrv_pin_buffer, p2p_token, 16);
AT(gdrdrv_pin_buffer, va_space, 24);
AT(gdrdrv_pin_buffer, handle, 32);
SIZE(gdrdrv_unpin_buffer, 8);
SIZE(gdrdrv_get_cb_flag, 16);
AT(gdrdrv_get_cb_flag, flag, 8);
SIZE(gdrdrv_get_info, 48);
AT(gdrdrv_get_info, va, 8);
AT(gdrdrv_get_info, mapped_size, 16);
AT(gdrdrv_get_info, page_size, 24);
AT(gdrdrv_get_info, tsc_khz, 28);
AT(gdrdrv_get_info, tm_cycles, 32);
AT(gdrdrv_get_info, mapped, 40);
AT(gdrdrv_get_info, wc_mapping, 44);
SIZE(gdrdrv_get_info_v2, 48);
AT(gdrdrv_get_info_v2, tm_cycles, 32);
AT(gdrdrv_get_info_v2, mapping_type, 40);
SIZE(gdrdrv_get_attr, 8);
AT(gdrdrv_get_attr, val, 4);
SIZE(gdrdrv_pin_buffer_v2, 32);
AT(gdrdrv_pin_buffer_v2, flags, 16);
AT(gdrdrv_pin_buffer_v2, handle, 24);
SIZE(gdrdrv_req_mapping_type, 16);
AT(gdrdrv_req_mapping_type, mapping_type, 8);
SIZE(gdrdrv_get_version, 8);
AT(gdrdrv_get_version, minimum_gdr_api_version, 4);

static const struct {
	const char *name;
	unsigned long number, want;
} requests[] = {
	{ "PIN_BUFFER", GDRDRV_IOC_PIN_BUFFER, 0xC028DA01 },
	{ "UNPIN_BUFFER", GDRDRV_IOC_UNPIN_BUFFER, 0xC008DA02 },
	{ "GET_CB_FLAG", GDRDRV_IOC_GET_CB_FLAG, 0xC008DA03 },
	{ "GET_INFO", GDRDRV_IOC_GET_INFO, 0xC008DA04 },
	{ "GET_INFO_V2", GDRDRV_IOC_GET_INFO_V2, 0xC008DA05 },
	{ "GET_ATTR", GDRDRV_IOC_GET_ATTR, 0xC008DA06 },
	{ "PIN_BUFFER_V2", GDRDRV_IOC_PIN_BUFFER_V2, 0xC020DA07 },
	{ "REQ_MAPPING_TYPE", GDRDRV_IOC_REQ_MAPPING_TYPE, 0xC008DA08 },
	{ "GET_VERSION", GDRDRV_IOC_GET_VERSION, 0xC008DAFF },
};

#define NR_REQUESTS (sizeof(requests) / sizeof(requests[0]))

static void numbers(int fd)
{
	struct gdrdrv_get_version version = { };
	uint64_t argument[8] = { };

	for (size_t i = 0; i < NR_REQUESTS; i++) {
		ok(requests[i].number == requests[i].want, "number of %s", requests[i].name);
		equal(request(fd, requests[i].number, (void *)8), -EFAULT, "%s with a bad pointer", requests[i].name);
	}
	equal(request(fd, GDRDRV_IOC_GET_VERSION, &version), 0, "GET_VERSION");
	equal(version.gdrdrv_version, 0x00020006, "version 2.6");
	equal(version.minimum_gdr_api_version, 0x00020000, "for libraries from 2.0");

	equal(request(fd, _IOWR(0xDB, 1, uint64_t), argument), -EINVAL, "another type byte");
	equal(request(fd, _IOWR(0xDA, 9, uint64_t), argument), -ENOTTY, "an unknown number");
	equal(request(fd, 0xC020DA01, argument), -ENOTTY, "a pin request of another size");
	equal(request(fd, 0xC028DA07, argument), -ENOTTY, "a second pin request of another size");
}

static int attribute(int fd, uint32_t attr, uint32_t *value)
{
	struct gdrdrv_get_attr arg = { .attr = attr, .val = *value };
	int err = request(fd, GDRDRV_IOC_GET_ATTR, &arg);

	*value = arg.val;
	return err;
}

static void attributes(int fd, unsigned int persistent)
{
	uint32_t value = 7;

	equal(attribute(fd, GDRDRV_ATTR_PERSISTENT_MAPPING, &value), 0, "attribute: persistent");
	equal(value, persistent, "its value");
	equal(attribute(fd, GDRDRV_ATTR_FORCE_PCIE, &value), 0, "attribute: FORCE_PCIE");
	equal(value, persistent, "its value");
	equal(attribute(fd, GDRDRV_ATTR_FEATURES, &value), 0, "attribute: features");
	equal(value, 7, "its value");
	equal(attribute(fd, 0, &value), -EINVAL, "attribute 0");
	equal(attribute(fd, 3, &value), -EINVAL, "an unknown attribute");
}

static int pin_token(int fd, uint64_t token, uint32_t va_space, uint64_t *handle)
{
	struct gdrdrv_pin_buffer arg = { .addr = BAR_VA, .size = 1, .p2p_token = token, .va_space = va_space };
	int err = request(fd, GDRDRV_IOC_PIN_BUFFER, &arg);

	*handle = arg.handle;
	return err;
}

static void refused_pins(int fd)
{
	static const struct {
		const char *name;
		uint64_t addr, size;
	} cases[] = {
		{ "address 0", 0, 1 },
		{ "size 0", BAR_VA, 0 },
		{ "size 0 at an odd address", BAR_VA + 1, 0 },
		{ "a size that wraps to 0", BAR_VA, -BAR_VA },
		{ "a size that wraps beyond", BAR_VA, -GPU_PAGE },
		{ "the last GPU page", -GPU_PAGE, GPU_PAGE },
		{ "an end that rounds up to 0", -GPU_PAGE, 1 },
		{ "more than 1 TiB", BAR_VA, (1ULL << 40) + 1 },
		{ "2^48 bytes: 2^32 GPU pages", BAR_VA, 1ULL << 48 },
		{ "the largest size", BAR_VA, UINT64_MAX },
	};
	long gets = knob("gets");
	uint64_t handle;

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		equal(pin(fd, cases[i].addr, cases[i].size, &handle), -EINVAL, "pin refused: %s", cases[i].name);
		equal(pin_flags(fd, cases[i].addr, cases[i].size, 0, &handle), -EINVAL, "the same in version 2");
	}
	equal(pin_flags(fd, BAR_VA, 1, 2, &handle), -EINVAL, "pin refused: an unknown flag");
	equal(pin_flags(fd, BAR_VA, 1, 1U << 31 | 1, &handle), -EINVAL, "pin refused: an unknown flag beside a known one");
	equal(pin_token(fd, 1, 0, &handle), -EINVAL, "pin refused: a token with persistent pages");
	equal(pin_token(fd, 0, 1, &handle), -EINVAL, "pin refused: a VA space with persistent pages");
	equal(knob("gets"), gets, "the driver was asked for none of them");
	equal(pin(fd, BAR_VA + BAR_PAGES * GPU_PAGE, 1, &handle), -EINVAL, "the driver's EINVAL comes through");
	equal(knob("gets"), gets + 1, "the driver was asked for that one");
	equal(pin(fd, BAR_VA, 1ULL << 40, &handle), -EINVAL, "1 TiB is for the driver to refuse");
	equal(knob("gets"), gets + 2, "which was asked");
}

/* Pin answers itself with @want when the driver fails as the knob says. */
static void failing_driver(int fd, const char *name, unsigned int value, int want)
{
	long live = knob("live");
	uint64_t handle;

	set_knob(name, value);
	equal(pin(fd, BAR_VA, 3 * GPU_PAGE, &handle), want, "pin with %s %d", name, (int)value);
	set_knob(name, 0);
	equal(knob("live"), live, "nothing stays pinned");
}

static void failing_drivers(int fd)
{
	failing_driver(fd, "fail_get", ENOMEM, -ENOMEM);
	failing_driver(fd, "fail_get", EIO, -EIO);
	failing_driver(fd, "fail_get", EBUSY, -EBUSY);
	failing_driver(fd, "fail_get", ENODEV, -ENODEV);
	failing_driver(fd, "fail_get", 524, -EOPNOTSUPP);	/* ENOTSUPP, which user space does not know */
	failing_driver(fd, "bad_version", 0x00010002, -EFAULT);
	failing_driver(fd, "bad_version", 0x00030000, -EFAULT);
	failing_driver(fd, "bad_page_size", 2, -EINVAL);
	failing_driver(fd, "bad_entries", 1, -EIO);
	failing_driver(fd, "bad_entries", -1U, -EIO);
	failing_driver(fd, "bad_address", 4096, -EIO);

	set_knob("bad_version", 0x00020001);
	uint64_t handle = must_pin(fd, BAR_VA, 1);
	set_knob("bad_version", 0);
	equal(unpin(fd, handle), 0, "a page table of a later minor version is fine");
}

static void handles(int fd)
{
	uint64_t a = must_pin(fd, BAR_VA, 3 * GPU_PAGE);
	uint64_t b = must_pin(fd, BAR_VA, 1);
	uint64_t c = must_pin(fd, BAR_VA + 100, 8);
	uint64_t d = must_pin(fd, BAR_VA + GPU_PAGE - 1, 2);
	int other = gdr_open();

	equal(a, 1, "the first handle is 1");
	equal(b, a + 3 * 16, "the next one follows the pages of the pin");
	equal(c, b + 16, "pins of one page have handles of their own");
	equal(d, c + 16, "and so on");
	equal(must_pin(other, BAR_VA, 1), 1, "another file counts for itself");
	close(other);

	equal(unpin(fd, b), 0, "unpin");
	equal(must_pin(fd, BAR_VA, 1), d + 32, "a handle is not used again at once");
	equal(unpin(fd, b), -EINVAL, "unpin a second time");
	equal(unpin(fd, 0), -EINVAL, "handle 0");
	equal(unpin(fd, a + 1), -EINVAL, "a number inside a pin's range");
	equal(unpin(fd, 0xdeadbeef), -EINVAL, "an unknown handle");
	equal(unpin(fd, a + (1ULL << 32)), -EINVAL, "a handle with a bit above 32");
	equal(unpin(fd, UINT64_MAX), -EINVAL, "the largest number");
	equal(mapping_type(fd, 0xdeadbeef), -EINVAL, "GET_INFO_V2 of an unknown handle");
	equal(cb_flag(fd, 0xdeadbeef), -EINVAL, "GET_CB_FLAG of an unknown handle");
	equal(request_type(fd, 0xdeadbeef, GDRDRV_MAPPING_WC), -EINVAL, "REQ_MAPPING_TYPE of an unknown handle");
	ok(map(fd, 0xdeadbeef, HOST_PAGE) == MAP_FAILED && errno == EINVAL, "mmap of an unknown handle");
	equal(mapping_type(fd, a), 0, "the first pin is still there");
	equal(unpin(fd, a), 0, "until it is unpinned");
}

static void info_before_map(int fd)
{
	uint64_t handle = must_pin(fd, BAR_VA + GPU_PAGE + 100, GPU_PAGE);
	struct gdrdrv_get_info v1 = { .handle = handle, .mapped = 9, .wc_mapping = 9 };
	struct gdrdrv_get_info_v2 v2;

	equal(request(fd, GDRDRV_IOC_GET_INFO, &v1), 0, "GET_INFO");
	ok(v1.va == BAR_VA + GPU_PAGE, "va is rounded down to a GPU page");
	equal(v1.mapped_size, 2 * GPU_PAGE, "the end is rounded up");
	equal(v1.page_size, GPU_PAGE, "page_size");
	ok(v1.tsc_khz > 1000, "tsc_khz %u", v1.tsc_khz);
	ok(v1.tm_cycles > 0, "tm_cycles %" PRIu64, (uint64_t)v1.tm_cycles);
	ok(v1.mapped == 0 && v1.wc_mapping == 0, "not mapped");
	equal(info(fd, handle, &v2), 0, "GET_INFO_V2");
	ok(!memcmp(&v1, &v2, 40), "the first 40 bytes are those of version 1");
	equal(v2.mapping_type, GDRDRV_MAPPING_NONE, "mapping type none");
	equal(cb_flag(fd, handle), 0, "callback flag 0");
	equal(unpin(fd, handle), 0, "unpin");
	v1.handle = handle;
	equal(request(fd, GDRDRV_IOC_GET_INFO, &v1), -EINVAL, "GET_INFO after unpin");
}

static void without_persistence(void)
{
	uint64_t handle;
	int fd;

	load("use_persistent_mapping=0");
	fd = gdr_open();
	attributes(fd, 0);
	equal(pin_flags(fd, BAR_VA, 1, GDRDRV_PIN_FLAG_FORCE_PCIE, &handle), -EINVAL, "FORCE_PCIE without persistence");
	equal(pin_flags(fd, BAR_VA, 1, 0, &handle), 0, "flags 0 without persistence");
	equal(unpin(fd, handle), 0, "unpin");
	equal(pin_token(fd, 5, 6, &handle), 0, "tokens are passed on without persistence");
	equal(unpin(fd, handle), 0, "unpin");
	failing_drivers(fd);
	close(fd);
}

int main(void)
{
	uint64_t handle;
	int fd;

	load("");
	fd = gdr_open();
	handles(fd);
	numbers(fd);
	attributes(fd, 1);
	refused_pins(fd);
	failing_drivers(fd);
	info_before_map(fd);
	equal(pin_flags(fd, BAR_VA, 1, GDRDRV_PIN_FLAG_FORCE_PCIE, &handle), 0, "FORCE_PCIE with persistent pages");
	close(fd);
	without_persistence();
	return done();
}
