// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/*
 * Never loaded. Built beside the module only for its Module.symvers: names and versions of what the driver exports,
 * computed from the prototypes in the driver's own header, so that the driver need not be built first. It has the
 * driver's name because that is what modprobe then loads before gdrdrv.
 */
#include <linux/errno.h>
#include <linux/module.h>
#include <linux/types.h>

#include <nv-p2p.h>

int nvidia_p2p_get_pages(uint64_t p2p_token, uint32_t va_space, uint64_t virtual_address, uint64_t length,
			 struct nvidia_p2p_page_table **page_table, void (*free_callback)(void *data), void *data)
{
	return -ENODEV;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages);

int nvidia_p2p_put_pages(uint64_t p2p_token, uint32_t va_space, uint64_t virtual_address,
			 struct nvidia_p2p_page_table *page_table)
{
	return -ENODEV;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages);

#ifdef NVIDIA_P2P_CAP_GET_PAGES_PERSISTENT_API
int nvidia_p2p_get_pages_persistent(uint64_t virtual_address, uint64_t length,
				    struct nvidia_p2p_page_table **page_table, uint32_t flags)
{
	return -ENODEV;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages_persistent);

int nvidia_p2p_put_pages_persistent(uint64_t virtual_address, struct nvidia_p2p_page_table *page_table, uint32_t flags)
{
	return -ENODEV;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages_persistent);
#endif

MODULE_DESCRIPTION("Symbol versions for the build of gdrdrv; not to be loaded");
MODULE_LICENSE("Dual MIT/GPL");
