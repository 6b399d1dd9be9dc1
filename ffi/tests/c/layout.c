/* Sizes, offsets and values of the interface; compiled as C and as C++, and never run. */
#include <gdrapi.h>
#include <gdrapi_ext.h>

#define ASSERT_NAMED(condition, line) typedef char assertion_in_line_##line[(condition) ? 1 : -1]
#define ASSERT_AT(condition, line) ASSERT_NAMED(condition, line)
#define ASSERT(condition) ASSERT_AT(condition, __LINE__)

ASSERT(sizeof(gdr_t) == 8);
ASSERT(sizeof(gdr_mh_t) == 8);
ASSERT(offsetof(gdr_mh_t, h) == 0);
ASSERT(sizeof(gdr_info_t) == 48);
ASSERT(sizeof(gdr_info_v2_t) == sizeof(struct gdr_info_v2));
ASSERT(offsetof(gdr_info_t, va) == 0);
ASSERT(offsetof(gdr_info_t, mapped_size) == 8);
ASSERT(offsetof(gdr_info_t, page_size) == 16);
ASSERT(offsetof(gdr_info_t, tm_cycles) == 24);
ASSERT(offsetof(gdr_info_t, cycles_per_ms) == 32);
ASSERT(offsetof(gdr_info_t, mapping_type) == 40);
ASSERT(sizeof(gdr_mapping_type_t) == 4);

ASSERT(GPU_PAGE_SIZE == 65536 && GPU_PAGE_OFFSET == 65535 && (GPU_PAGE_MASK & 0x12345678) == 0x12340000);
ASSERT(GDR_API_VERSION == 0x20006 && MINIMUM_GDRDRV_VERSION == 0x20000);
ASSERT(GDR_MAPPING_TYPE_NONE == 0 && GDR_MAPPING_TYPE_WC == 1);
ASSERT(GDR_MAPPING_TYPE_CACHING == 2 && GDR_MAPPING_TYPE_DEVICE == 3);
ASSERT(GDR_PIN_FLAG_DEFAULT == 0 && GDR_PIN_FLAG_FORCE_PCIE == 1 && GDR_MAP_FLAG_DEFAULT == 0);
ASSERT(GDR_ATTR_USE_PERSISTENT_MAPPING == 1 && GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE == 2);
ASSERT(GDR_ATTR_USING_DMA_BUF_MMAP == 3);

ASSERT(sizeof(gdrx_mapping_facts_t) == 64);
ASSERT(offsetof(gdrx_mapping_facts_t, mapping_type) == 24);
ASSERT(offsetof(gdrx_mapping_facts_t, after_free) == 28);
ASSERT(offsetof(gdrx_mapping_facts_t, routine) == 48);
ASSERT(sizeof(gdrx_cost_t) == 32 && offsetof(gdrx_cost_t, get_bytes_per_second) == 24);
ASSERT(sizeof(gdrx_copier_t) == 8);
ASSERT(sizeof(gdrx_error_kind_t) == 4 && GDRX_ERROR_INTERNAL == 18);
ASSERT(GDRX_ERROR_WOULD_BLOCK == 19 && GDRX_ERROR_TIMED_OUT == 20 && GDRX_ERROR_KERNEL_GONE == 21);
ASSERT(sizeof(gdrx_agent_t) == 8 && sizeof(gdrx_auto_t) == 8 && sizeof(gdrx_channel_t) == 8);
ASSERT(sizeof(gdrx_mailbox_t) == 8 && sizeof(gdrx_latest_t) == 8);
ASSERT(sizeof(gdrx_range_t) == 16 && offsetof(gdrx_range_t, size) == 8);
ASSERT(sizeof(gdrx_segment_t) == 32 && offsetof(gdrx_segment_t, at) == 24);
ASSERT(sizeof(gdrx_agent_options_t) == 56 && offsetof(gdrx_agent_options_t, packet_bytes) == 20);
ASSERT(offsetof(gdrx_agent_options_t, idle_us) == 24 && offsetof(gdrx_agent_options_t, cpu_stand_in) == 48);
ASSERT(sizeof(gdrx_auto_options_t) == 48 && offsetof(gdrx_auto_options_t, threads) == 16);
ASSERT(offsetof(gdrx_auto_options_t, cpus) == 24 && offsetof(gdrx_auto_options_t, milliseconds) == 40);
ASSERT(sizeof(gdrx_channel_options_t) == 40 && offsetof(gdrx_channel_options_t, gpu) == 8);
ASSERT(offsetof(gdrx_channel_options_t, placement) == 24 && offsetof(gdrx_channel_options_t, kernel_limit_ms) == 32);
ASSERT(sizeof(gdrx_kernel_state_t) == 4 && GDRX_KERNEL_ENDED == 2 && GDRX_DEVICE_TO_HOST == 1);

/* The types, not only the names: a declaration that differs does not compile. */
gdr_t (*open_is)(void) = gdr_open;
int (*close_is)(gdr_t) = gdr_close;
int (*pin_is)(gdr_t, unsigned long, size_t, uint64_t, uint32_t, gdr_mh_t *) = gdr_pin_buffer;
int (*pin_v2_is)(gdr_t, unsigned long, size_t, uint32_t, gdr_mh_t *) = gdr_pin_buffer_v2;
int (*unpin_is)(gdr_t, gdr_mh_t) = gdr_unpin_buffer;
int (*flag_is)(gdr_t, gdr_mh_t, int *) = gdr_get_callback_flag;
int (*info_is)(gdr_t, gdr_mh_t, gdr_info_t *) = gdr_get_info;
int (*map_is)(gdr_t, gdr_mh_t, void **, size_t) = gdr_map;
int (*map_v2_is)(gdr_t, gdr_mh_t, void **, size_t, int) = gdr_map_v2;
int (*unmap_is)(gdr_t, gdr_mh_t, void *, size_t) = gdr_unmap;
int (*to_is)(gdr_mh_t, void *, const void *, size_t) = gdr_copy_to_mapping;
int (*from_is)(gdr_mh_t, void *, const void *, size_t) = gdr_copy_from_mapping;
void (*runtime_is)(int *, int *) = gdr_runtime_get_version;
int (*driver_is)(gdr_t, int *, int *) = gdr_driver_get_version;
int (*attribute_is)(gdr_t, gdr_attr_t, int *) = gdr_get_attribute;
const char *(*string_is)(gdr_mapping_type_t) = gdr_get_mapping_type_string;
int (*agent_is)(gdr_t, const gdrx_range_t *, size_t, const gdrx_agent_options_t *, gdrx_agent_t *) = gdrx_agent_create;
int (*auto_is)(gdr_t, uint64_t, const gdrx_auto_options_t *, gdrx_auto_t *) = gdrx_auto_create;
int (*channel_is)(gdr_t, const gdrx_channel_options_t *, gdrx_channel_t *) = gdrx_channel_create;
int (*mailbox_is)(gdr_t, const gdrx_channel_options_t *, size_t, size_t, gdrx_mailbox_t *) = gdrx_mailbox_create;
int (*latest_is)(gdr_t, int, const void *, size_t, gdrx_latest_t *) = gdrx_latest_create;
