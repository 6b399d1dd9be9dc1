// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/* /sys/kernel/debug/nvp2p: one file per knob and counter. Writing "VA LEN" to `free` frees memory. */
#include <linux/module.h>
#include <linux/uaccess.h>

#include "provider.h"

static struct dentry *dir;

static ssize_t free_write(struct file *filp, const char __user *from, size_t count, loff_t *pos)
{
	char text[64];
	u64 va, len;

	if (count >= sizeof(text))
		return -EINVAL;
	if (copy_from_user(text, from, count))
		return -EFAULT;
	text[count] = 0;
	if (sscanf(text, "%llx %llx", &va, &len) != 2)
		return -EINVAL;
	nvp2p_free_range(va, len);
	return count;
}

static const struct file_operations free_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = free_write,
};

void nvp2p_knobs_init(void)
{
	struct nvp2p_knobs *knobs = &nvp2p_knobs;

	dir = debugfs_create_dir("nvp2p", NULL);
	debugfs_create_u32("order", 0600, dir, &knobs->order);
	debugfs_create_u32("fail_get", 0600, dir, &knobs->fail_get);
	debugfs_create_u32("fail_put", 0600, dir, &knobs->fail_put);
	debugfs_create_u32("delay_get_ms", 0600, dir, &knobs->delay_get_ms);
	debugfs_create_u32("delay_put_ms", 0600, dir, &knobs->delay_put_ms);
	debugfs_create_u32("delay_callback_ms", 0600, dir, &knobs->delay_callback_ms);
	debugfs_create_u32("callback_in_get", 0600, dir, &knobs->callback_in_get);
	debugfs_create_u32("bad_version", 0600, dir, &knobs->bad_version);
	debugfs_create_u32("bad_page_size", 0600, dir, &knobs->bad_page_size);
	debugfs_create_u32("bad_entries", 0600, dir, &knobs->bad_entries);
	debugfs_create_u32("bad_address", 0600, dir, &knobs->bad_address);
	debugfs_create_atomic_t("live", 0400, dir, &knobs->live);
	debugfs_create_atomic_t("gets", 0400, dir, &knobs->gets);
	debugfs_create_atomic_t("puts", 0400, dir, &knobs->puts);
	debugfs_create_atomic_t("puts_not_found", 0400, dir, &knobs->puts_not_found);
	debugfs_create_atomic_t("callbacks", 0400, dir, &knobs->callbacks);
	debugfs_create_file("free", 0200, dir, NULL, &free_fops);
	debugfs_create_file("pte", 0600, dir, NULL, &nvp2p_pte_fops);
}

void nvp2p_knobs_exit(void)
{
	debugfs_remove(dir);
}
